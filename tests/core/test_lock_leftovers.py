"""The temporary file of a process that was killed while it took a folder is removed by the next run in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from loopwright.core.checkpoint.ownership.claim import own_claim
from loopwright.core.checkpoint.ownership.lock_file import LOCK, LockFile

KILLED = """
import os, signal, sys
from pathlib import Path
from loopwright.core.checkpoint.ownership import lock_file
from loopwright.core.checkpoint.ownership.claim import own_claim

unlink = os.unlink
os.unlink = lambda path: os.kill(os.getpid(), signal.SIGKILL)  # after the link, before the temporary name is removed
lock_file.LockFile(Path(sys.argv[1])).create(own_claim("killed"))
"""


def test_the_temporary_file_of_a_killed_process_is_removed_at_once(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=120)
    assert done.returncode == -9
    left = [path for path in tmp_path.iterdir() if path.name.startswith(f".{LOCK}.")]
    assert len(left) == 1 and (tmp_path / LOCK).exists()
    (tmp_path / f".{LOCK}.mine").write_bytes(own_claim("of a process that lives").encoded())
    lock = LockFile(tmp_path)
    lock.replace(own_claim("next"))
    lock.remove()
    assert os.listdir(tmp_path) == [f".{LOCK}.mine"]


KILLED_EARLY = """
import os, signal, sys
from pathlib import Path
from loopwright.core.checkpoint.ownership import lock_file
from loopwright.core.checkpoint.ownership.claim import own_claim

os.write = lambda *given: os.kill(os.getpid(), signal.SIGKILL)  # after the file is made, before anything is in it
lock_file.LockFile(Path(sys.argv[1])).create(own_claim("killed"))
"""


def test_an_empty_file_of_a_killed_process_is_removed_at_once(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_EARLY, str(tmp_path)], timeout=120)
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(f".{LOCK}.") and left.stat().st_size == 0
    place = left.name.removeprefix(f".{LOCK}.").partition("-")[0]
    kept = {f".{LOCK}.{place}-{os.getpid()}-aa", f".{LOCK}.00000000-1-aa", f".{LOCK}.of-an-older-version"}
    for name in kept:  # of a process that lives, of another machine, and of one that cannot be known
        (tmp_path / name).touch()
    lock = LockFile(tmp_path)
    assert lock.create(own_claim("next"))
    lock.remove()
    assert set(os.listdir(tmp_path)) == kept

"""Preparing the compiler: it is imported beside other work, and nothing of that is left."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from loopwright.speed.compile import preparation

CODE = """
import gc, sys, threading
import torch
from loopwright.speed.compile.preparation import await_imports, get_ready

await_imports()  # nothing was begun
assert "torch._inductor.compile_fx" not in sys.modules
if sys.argv[1] == "frozen":
    gc.freeze()
before = gc.get_freeze_count()
get_ready()
get_ready()
mine = [thread for thread in threading.enumerate() if thread.name == "loopwright-imports"]
assert len(mine) <= 1
await_imports()
assert not any(thread.is_alive() for thread in mine)
assert "torch._inductor.compile_fx" in sys.modules
assert (gc.get_freeze_count() > 0) == (before > 0)

module = torch.nn.Linear(2, 2)
module.compile(backend="aot_eager")
module(torch.ones(2, 2)).sum().backward()
print("done")
"""
BROKEN = """
import sys
sys.modules["torch._inductor.compile_fx"] = None  # importing it raises
"""
FORKED = """
import gc, os, signal, sys, threading
import torch
from loopwright.speed.compile import preparation

begun, go_on = threading.Event(), threading.Event()


class Slow:
    \"\"\"The compiler is half imported until a fork was begun.\"\"\"

    def find_spec(self, name, path=None, target=None):
        if name == "torch._inductor.ir" and threading.current_thread().name == "loopwright-imports":
            begun.set()
            go_on.wait(5.0)


sys.meta_path.insert(0, Slow())
preparation.get_ready()
assert begun.wait(60.0)
if sys.argv[1] == "frozen":
    gc.freeze()
child = os.fork()
if not child:
    signal.alarm(20)
    import torch._inductor.compile_fx
    os._exit(0 if (gc.get_freeze_count() > 0) == (sys.argv[1] == "frozen") else 1)
go_on.set()
assert os.waitpid(child, 0)[1] == 0
preparation.await_imports()
assert (gc.get_freeze_count() > 0) == (sys.argv[1] == "frozen")
print("done")
"""


def run(code: str, how: str = "plain") -> None:
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code, how], capture_output=True, text=True, timeout=120, env=environment
    )
    assert found.returncode == 0 and found.stdout == "done\n" and not found.stderr, found.stderr


def test_the_compiler_is_imported_once_beside_other_work() -> None:
    for how in ("plain", "frozen"):
        run(CODE, how)


def test_an_import_that_fails_is_not_raised_where_it_was_begun() -> None:
    begun = CODE.split("await_imports()  # nothing")[0]
    run(BROKEN + begun + "get_ready()\nawait_imports()\nassert gc.get_freeze_count() == 0\nprint('done')")


def test_a_process_forked_during_the_import_can_import_too() -> None:
    """What a user has frozen before the fork stays frozen."""
    for how in ("plain", "frozen"):
        run(FORKED, how)


@pytest.mark.parametrize("works", [True, False, None])
def test_triton_is_hashed_beside_other_work(works: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton (None), and where hashing fails, nothing is raised or printed."""
    ran: list[str] = []
    raised: list[Any] = []

    def triton_key() -> str:
        ran.append(threading.current_thread().name)
        if not works:
            raise OSError("there is no library")
        return "key"

    cache = ModuleType("triton.runtime.cache")
    cache.triton_key = triton_key  # type: ignore[attr-defined]
    for name in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", cache if works is not None else None)
    monkeypatch.setattr(threading, "excepthook", raised.append)
    preparation._hash_triton()
    for thread in threading.enumerate():
        if thread.name == "loopwright-triton":
            thread.join()
    assert ran == ([] if works is None else ["loopwright-triton"]) and not raised

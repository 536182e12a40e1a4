"""The steps of the GPU benchmark call scripts that exist, with options that they have, and end in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import everyday  # noqa: E402
import on_gpu  # noqa: E402


@pytest.mark.parametrize("name", on_gpu.STEPS)
def test_a_step_calls_a_script_with_its_options(name: str) -> None:
    script, *words = on_gpu.STEPS[name].command.split()
    assert on_gpu.STEPS[name].usual < on_gpu.STEPS[name].longest
    if script == "everyday.py":
        everyday.parser().parse_args(words)
    else:
        text = (BENCHMARKS / script).read_text()
        assert all(f'"{word}"' in text for word in words if word.startswith("--"))


def test_a_step_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    log, started = tmp_path / "log", time.monotonic()
    assert on_gpu.run(on_gpu.Step(f"{tmp_path}/slow.py", 1, 2), tmp_path, log, 5) == "timed out"
    assert log.read_text() == "begun\n" and time.monotonic() - started < 120


def test_what_does_not_fit_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "--minutes", "0.1", "--to", str(tmp_path)])
    on_gpu.main()
    assert capsys.readouterr().out.count("left out") == len(on_gpu.STEPS) and not list(tmp_path.iterdir())


def test_steps_that_have_ended_are_not_repeated_and_everything_is_in_one_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name, code in (("one", 0), ("two", 3)):
        (tmp_path / f"{name}.py").write_text(f"import sys\nopen(sys.argv[1], 'a').write('{name}')\nsys.exit({code})\n")
    steps = {name: on_gpu.Step(f"{tmp_path}/{name}.py FOLDER/{name}.json", 1, 60) for name in ("one", "two")}
    monkeypatch.setattr(on_gpu, "STEPS", steps)
    folder, archive = tmp_path / "folder", tmp_path / "all.tar.gz"
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["on_gpu.py", "--to", str(folder), "--pack", str(archive)])
        on_gpu.main()
    said = capsys.readouterr().out
    assert said.count("done") == 1 and said.count("exit 3") == 1
    with tarfile.open(archive) as packed:
        assert packed.getnames() == ["one.json", "one.log", "steps.json", "two.json", "two.log"]
        assert packed.extractfile("one.json").read() == b"one"  # type: ignore[union-attr]


PARENT = """
import sys, time
from processes import StartedArm
started = StartedArm("one", [], 600, script=sys.argv[1])
print(started.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_no_arm_is_left_when_a_benchmark_is_killed(tmp_path: Path) -> None:
    (tmp_path / "arm.py").write_text("import time\ntime.sleep(600)\n")
    command = [sys.executable, "-c", PARENT, str(tmp_path / "arm.py")]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        arm = int(parent.stdout.readline())  # type: ignore[union-attr]
        parent.send_signal(signal.SIGKILL)
    end = time.monotonic() + 60
    while is_running(arm):
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

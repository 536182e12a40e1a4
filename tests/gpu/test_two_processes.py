"""Two ranks on one GPU, over gloo: DDP without padding, resuming, a killed rank; FSDP2 is refused.

Also runs without pytest: `python tests/gpu/test_two_processes.py`; with `--cpu` where there is no GPU.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[2])]

from tests.gpu.script import HAS_GPU, needs_gpu, run_tests

pytestmark = needs_gpu()
TIMEOUT = 120 if HAS_GPU else 400
CASES = ("ddp",) if HAS_GPU else ("ddp", "fsdp")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPT = str(HERE / "two_processes.py")


def command(*words: str, processes: int) -> list[str]:
    launched = ["-m", "loopwright", "launch", "--processes", str(processes), "--no-log-files"] if processes > 1 else []
    return [sys.executable, *launched, SCRIPT, *words, *([] if HAS_GPU else ["--cpu"])]


def environment() -> dict[str, str]:
    """One device, no compiler (it takes longer than all runs), and no place of this process among others."""
    place = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in place}
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    own = {"CUDA_VISIBLE_DEVICES": "0", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    return {**kept, **own, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def results() -> dict[str, Any]:
    """What the runs came to; they are started once, also if they fail."""
    found = ran()
    assert isinstance(found, dict), found
    return found


@functools.cache
def ran() -> dict[str, Any] | str:
    """The runs of two ranks, one after the other in the same processes, beside that of one process; or the failure."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            subprocess.Popen(
                command(folder, *cases, processes=processes),
                env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for cases, processes in ((CASES, 2), (("single",), 1))
        ]  # fmt: skip
        try:
            said = [run.communicate(timeout=TIMEOUT)[0] for run in runs]
        except subprocess.TimeoutExpired:
            return f"not done after {TIMEOUT} s"
        finally:
            for run in runs:
                run.kill()
        for run, text in zip(runs, said, strict=True):
            if run.returncode:
                return f"exit code {run.returncode}\n{text[-6000:]}"
        found = {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")}
        return {**found, "said": said[0]}


def assert_like_one_process(case: str) -> None:
    single = results()["single-0"]["whole"]
    first, second = (results()[f"{case}-{rank}"]["whole"] for rank in (0, 1))
    assert first["hashes"] == second["hashes"] and first["losses"] == second["losses"]
    assert first["step"] == single["step"] == 6
    for name, tolerance in (("losses", 0.01), ("norms", 0.05)):
        for ours, expected in zip(first[name], single[name], strict=True):
            assert abs(ours - expected) <= tolerance * abs(expected), (case, name, first[name], single[name])


def assert_resumes_to_the_bit(case: str) -> None:
    for rank in (0, 1):
        found = results()[f"{case}-{rank}"]
        assert found["resumed"]["hashes"] == found["whole"]["hashes"]
        assert found["resumed"]["losses"] == found["whole"]["losses"]


def test_both_ranks_are_on_one_device_and_communicate_by_gloo() -> None:
    for case in CASES:
        for rank in (0, 1):
            found = results()[f"{case}-{rank}"]["whole"]
            assert found["strategy"] == {"ddp": "DataParallel", "fsdp": "FullySharded"}[case]
            assert found["device"] == ("cuda:0" if HAS_GPU else "cpu")
            assert found["backend"] == "gloo"
    if HAS_GPU:
        assert "ranks 0, 1 share one cuda device: they communicate by gloo" in results()["said"]


def test_ddp_without_padding_is_like_one_process() -> None:
    assert_like_one_process("ddp")
    plans = [results()[f"ddp-{rank}"]["whole"]["plan"] for rank in (0, 1)]
    assert [plan["layout"] for plan in plans] == ["flat"] * 2, plans


def test_ddp_resumes_to_the_bit() -> None:
    assert_resumes_to_the_bit("ddp")


def test_fsdp_is_refused_on_a_shared_gpu() -> None:
    """gloo crashes with shards on a CUDA device; on CPUs it works."""
    if not HAS_GPU:
        assert_like_one_process("fsdp")
        assert_resumes_to_the_bit("fsdp")
        return
    with tempfile.TemporaryDirectory() as folder:
        words = command(folder, "fsdp", processes=2)
        done = subprocess.run(words, env=environment(), timeout=TIMEOUT, capture_output=True, text=True)
        assert done.returncode != 0 and "fsdp needs nccl" in done.stdout + done.stderr, done.stderr[-6000:]


def test_a_killed_rank_ends_the_other_with_its_name() -> None:
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        done = subprocess.run(
            command(folder, "killed", processes=2), env=environment(), timeout=TIMEOUT, capture_output=True, text=True
        )
        said = done.stdout + done.stderr
        assert done.returncode != 0, said[-6000:]
        assert "rank 1" in said and ("SIGKILL" in said or "Signal 9" in said or "exitcode  : -9" in said), said[-6000:]
        assert not list(Path(folder).glob("killed-*.json"))  # rank 0 did not go on alone
        print(f"ended after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.argv = [word for word in sys.argv if word != "--cpu"]
    sys.exit(run_tests(globals()))

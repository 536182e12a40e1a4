"""Everything that has to be measured on a GPU, the most important first, within a number of minutes.

    python benchmarks/on_gpu.py [--minutes 25] [--only tests peaks-vit ...] [--to FOLDER]

Each step is a script with a time limit. A step begins only if its usual time is left. Its log and its numbers are in
the folder as soon as it ends, so that nothing is lost if the machine has to be returned.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent
TODAY = date.today().isoformat()


@dataclass(frozen=True)
class Step:
    """A command, in which FOLDER is the folder of results, and its usual and longest time."""

    command: str
    usual: int
    longest: int


def everyday(tasks: str, more: str = "", *, usual: int) -> Step:
    """Workloads of the everyday benchmark; all of them share one file."""
    options = f"--to FOLDER/everyday-{TODAY}.json --budget {usual} {more}"
    return Step(f"everyday.py {tasks} {options}", usual, usual + 60)


ALL_ARMS = "--arms loopwright hand transformers --preload"
SLOW = "--beside 4 --timeout 420"
"""For arms that get ready slowly: a large model that is compiled as a whole takes minutes."""
CACHE = "--cache FOLDER/../cache"
PEAKS = ("vit", "whisper", "custom", "gpt2")
"""Workloads of which every new peak of memory is printed with the function that ran, until all is decided."""

STEPS = {
    "tests": Step("-m pytest tests/gpu -q", 300, 480),
    "ready": Step(f"ready.py sft-64 {CACHE}", 75, 120),
    "ready-warm": Step(f"ready.py sft-64 {CACHE}", 50, 90),
    "sft-60": Step(
        f"everyday.py sft-64 --arms loopwright --planned 60 --updates 40 {CACHE} --to FOLDER/sft-60-{TODAY}.json",
        60, 120,
    ),
    "sft-8": everyday("sft-8", f"{ALL_ARMS} {SLOW}", usual=220),
    "alone": everyday("gpt2 vit convnext t5 custom", "--arms loopwright", usual=300),
    **{f"peaks-{task}": Step(f"ready.py {task} --updates 30", 45, 90) for task in PEAKS},
    "loops": everyday("sft-64 lora bert", f"{ALL_ARMS} {SLOW}", usual=440),
    "pairs": everyday("t5 whisper custom", f"{ALL_ARMS} {SLOW}", usual=400),
    "evaluation": Step(f"evaluation.py --model bert --json FOLDER/evaluation-bert-{TODAY}.json", 60, 120),
    "generation": Step(f"generation.py --arms ours transformers --json FOLDER/generation-{TODAY}.json", 150, 240),
    "check": Step(f"check_gpu.py FOLDER/check-gpu-{TODAY}.json --forks --limit 170", 180, 240),
    "rest": everyday("gpt2 vit convnext mlp", "", usual=300),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Everything that has to be measured on a GPU.")
    parser.add_argument("--minutes", type=float, default=25.0, help="after which no step is running")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--to", type=Path, default=HERE / "results", help="where logs and numbers go")
    options = parser.parse_args()
    folder, end = options.to.resolve(), time.monotonic() + 60 * options.minutes
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        step, left = STEPS[name], end - time.monotonic()
        if left < step.usual:
            print(f"{name:12} left out: it usually takes {step.usual} s, and {left:.0f} s are left", flush=True)
            continue
        started = time.monotonic()
        code = run(step, folder, folder / f"{name}.log", min(step.longest, left))
        print(f"{name:12} {code:9} after {time.monotonic() - started:.0f} s", flush=True)


def run(step: Step, folder: Path, log: Path, seconds: float) -> str:
    """Run a step; returns how it ended."""
    words = step.command.replace("FOLDER", str(folder)).split()
    script = words if words[0] == "-m" else [str(HERE / words[0]), *words[1:]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE.parent)])}
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *script], cwd=HERE.parent, env=environment, stdout=stream, stderr=stream,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            with suppress(ProcessLookupError):  # also its children, which may hold the memory of the GPU
                os.killpg(process.pid, signal.SIGKILL)
    return "done" if code == 0 else f"exit {code}"


if __name__ == "__main__":
    main()

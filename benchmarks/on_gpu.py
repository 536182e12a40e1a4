"""Everything that has to be measured on a GPU, the most important first, within a number of minutes.

    python benchmarks/on_gpu.py [--minutes 25] [--only tests ready ...] [--to FOLDER] [--pack FILE]

Each step is a script with a time limit. A step begins only if its usual time is left. Its log and its numbers are in
the folder as soon as it ends, and with --pack in one archive, so that nothing is lost if the machine has to be
returned. Steps that have ended are not repeated: where a command may take ten minutes, run the same one three times:

    python benchmarks/on_gpu.py --minutes 9.3 --pack $OUT/on_gpu.tar.gz

The tables are written from JSON files in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
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
SLOW = "--beside 4 --timeout 530"
"""For arms that get ready slowly: a large model that is compiled as a whole takes minutes."""
CACHE = "--cache FOLDER/../cache"
PEAKS = ("vit", "convnext", "custom", "whisper", "gpt2")
"""Workloads of which every new peak of memory is printed with the function that ran, until all is decided."""

STEPS = {
    "hands": everyday("sft-8 t5 lora", f"--arms hand --preload {SLOW}", usual=530),
    "ready": Step(f"ready.py sft-64 {CACHE}", 50, 110),
    "ready-warm": Step(f"ready.py sft-64 {CACHE}", 40, 80),
    "sft-60": Step(
        f"everyday.py sft-64 --arms loopwright --planned 60 --updates 40 {CACHE} --to FOLDER/sft-60-{TODAY}.json",
        60, 100,
    ),
    "trainers": everyday("sft-8 t5 lora", "--arms loopwright transformers --preload --beside 2", usual=330),
    "tests": Step("../tests/gpu/script.py", 540, 600),
    "convnext": everyday("convnext", "--arms loopwright", usual=75),
    "generation": Step(f"generation.py --arms ours transformers --json FOLDER/generation-{TODAY}.json", 150, 240),
    "evaluation": Step(f"evaluation.py --model bert --timeout 90 --json FOLDER/evaluation-bert-{TODAY}.json", 60, 150),
    **{f"peaks-{task}": Step(f"ready.py {task} --updates 30", 45, 90) for task in PEAKS},
    "profiles": Step(
        f"everyday.py lora sft-64 whisper --arms loopwright --profile --warmup 40 --to FOLDER/profiles-{TODAY}.json",
        200, 280,
    ),
    "products": Step(f"products.py sft-64 lora whisper --to FOLDER/products-{TODAY}.json", 30, 60),
    "check": Step(f"check_gpu.py FOLDER/check-gpu-{TODAY}.json --forks --limit 170", 180, 240),
    "loops": everyday("sft-64 bert whisper custom", f"{ALL_ARMS} {SLOW}", usual=440),
    "rest": everyday("gpt2 vit convnext mlp", "", usual=300),
}  # fmt: skip
ENDED = "steps.json"
"""How each step ended, in the folder."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Everything that has to be measured on a GPU.")
    parser.add_argument("--minutes", type=float, default=25.0, help="after which no step is running")
    parser.add_argument("--only", nargs="+", choices=STEPS, metavar="STEP", help=f"also again: {', '.join(STEPS)}")
    parser.add_argument("--to", type=Path, default=HERE.parent / "build" / "on_gpu", help="for logs and numbers")
    parser.add_argument("--pack", type=Path, help="an archive of them, which is written again after each step")
    options = parser.parse_args()
    folder, end = options.to.resolve(), time.monotonic() + 60 * options.minutes
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ENDED
    ended = json.loads(file.read_text()) if file.exists() else {}
    for name in options.only or [name for name in STEPS if name not in ended]:
        step, left = STEPS[name], end - time.monotonic()
        if left < step.usual:
            print(f"{name:12} left out: it usually takes {step.usual} s, and {left:.0f} s are left", flush=True)
            continue
        started = time.monotonic()
        code = run(step, folder, folder / f"{name}.log", min(step.longest, left))
        ended[name] = f"{code} after {time.monotonic() - started:.0f} s"
        print(f"{name:12} {ended[name]}", flush=True)
        file.write_text(json.dumps(ended, indent=1) + "\n")
        if options.pack is not None:
            pack(folder, options.pack)


def pack(folder: Path, archive: Path) -> None:
    """Write the files of a folder into an archive, which is complete at any time."""
    part = archive.with_name(f".{archive.name}")
    with tarfile.open(part, "w:gz") as made:
        for file in sorted(each for each in folder.iterdir() if each.is_file()):
            made.add(file, file.name)
    part.replace(archive)


def run(step: Step, folder: Path, log: Path, seconds: float) -> str:
    """Run a step; returns how it ended."""
    script, *words = step.command.replace("FOLDER", str(folder)).split()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE.parent)])}
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, str(HERE / script), *words],
            cwd=HERE.parent, env=environment, stdout=stream, stderr=stream, start_new_session=True,
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

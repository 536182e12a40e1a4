"""Kills and signals at random moments; after each the same command again, until it ends, compared with a run in peace.

    python -m tests.faults.random_kills --kills 1000 --minutes 60 --seed 0 --to kills.jsonl

Writes one line for each kill and one for each case, which is a run with up to three kills. Started again with the same
file and seed, it goes on after the last finished case. The last line printed is the summary.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO

from tests.launch.jobs import LAUNCH, Job

from .checks import differences, leftovers, result, said, trace
from .conftest import Forks

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MARK = "LOOPWRIGHT_KILLS"
"""Variable that marks all processes of a case, to find those that are left."""
SCRIPT = str(Path(__file__).with_name("launched_run.py"))
LIMIT, TIMED_OUT = 180, 124
"""Seconds that a run may take, and its status if it takes longer."""
EVALUATED = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": False}
LAUNCHED = {"max_steps": 10, "pause": 0.05, **EVALUATED}


@dataclass(frozen=True)
class Variant:
    """A kind of run: its options, and what its processes are made of."""

    options: dict[str, Any]
    module: str = "tests.faults.runs"
    processes: int = 1
    seconds: float = 0.6
    """How long the part of a run takes in which it is killed."""
    share: int = 4
    """Of the cases, relative to the others."""


VARIANTS = {
    "native": Variant({"pause": 0.03, **EVALUATED}),
    "native, saved now, accumulated": Variant({"pause": 0.03, "async_save": False, "accumulation": 3, **EVALUATED}),
    "transformers": Variant({"pause": 0.03, "checkpoint_format": "transformers", **EVALUATED}),
    "stream": Variant({"pause": 0.03, "data": "iterable", **EVALUATED}),
    "stream with a state": Variant({"pause": 0.03, "data": "stateful", **EVALUATED}),
    "stream with a state, transformers": Variant(
        {"pause": 0.03, "data": "stateful", "checkpoint_format": "transformers", **EVALUATED}
    ),
    "TensorFlow": Variant({"pause": 0.05}, module="tests.faults.tf_runs", seconds=3.0, share=2),
    "two processes": Variant(LAUNCHED, processes=2, seconds=1.0, share=1),
    "two processes, transformers": Variant(
        {**LAUNCHED, "checkpoint_format": "transformers"}, processes=2, seconds=1.0, share=1
    ),
    "two processes, stream with a state": Variant({**LAUNCHED, "data": "stateful"}, processes=2, seconds=1.0, share=1),
    "two processes with BatchNorm": Variant(
        {**LAUNCHED, "normed": True, "ddp_broadcast_buffers": False}, processes=2, seconds=1.0, share=1
    ),
    "FSDP2": Variant({**LAUNCHED, "fsdp": True}, processes=2, seconds=1.0, share=1),
    "FSDP2 with BatchNorm": Variant({**LAUNCHED, "fsdp": True, "normed": True}, processes=2, seconds=1.0, share=1),
}


@dataclass
class Kill:
    """One signal, to whom it was sent, and how the run ended."""

    signal: str
    target: str
    after: float
    status: int | None = None

    @property
    def number(self) -> signal.Signals:
        return signal.Signals[self.signal]


class Runner(Protocol):
    """Runs one variant in processes of its own."""

    def run(self, folder: Path, *, resume: Any = "auto", kill: Kill | None = None) -> int: ...
    def wrong_end(self, folder: Path, kill: Kill) -> str | None: ...
    def differences(self, folder: Path, reference: Path) -> list[str]: ...


class Forked:
    """Runs of one process, each forked from a process that has imported everything."""

    def __init__(self, forks: Forks, variant: Variant) -> None:
        self.forks, self.variant = forks, variant

    def run(self, folder: Path, *, resume: Any = "auto", kill: Kill | None = None) -> int:
        sent = {} if kill is None else {"kill_after": kill.after, "kill_with": kill.number}
        return self.forks.run("train", folder, timeout=120, resume=resume, **sent, **self.variant.options)

    def wrong_end(self, folder: Path, kill: Kill) -> str | None:
        """What is wrong with the status: before and after training, a signal has its usual effect."""
        if "Traceback" in said(folder):
            return f"a traceback: {said(folder)[-2000:]}"
        usual = 130 if kill.number == signal.SIGINT else -kill.number
        stopped = () if kill.number == signal.SIGKILL else (75,)
        return None if kill.status in (0, usual, *stopped) else f"ended with {kill.status}: {said(folder)[-2000:]}"

    def differences(self, folder: Path, reference: Path) -> list[str]:
        return differences(folder, reference)


class Launched:
    """Runs of several processes, started by `loopwright launch`."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant

    def run(self, folder: Path, *, resume: Any = "auto", kill: Kill | None = None) -> int:
        folder.parent.mkdir(parents=True, exist_ok=True)
        options = json.dumps({**self.variant.options, "resume": resume})
        words = [*LAUNCH, "-n", str(self.variant.processes), "--no-log-files", SCRIPT, str(folder), options]
        began = len(trace(folder, "begin"))
        job = Job(words, folder.parent, folder.name, {MARK: str(folder)})
        try:
            if kill is not None:
                self._send(job, kill, lambda: len(trace(folder, "begin")) > began)
            return job.process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            job.close()
            return TIMED_OUT
        finally:
            if kill is None or kill.target != "launcher":
                job.close()

    def _send(self, job: Job, kill: Kill, has_begun: Callable[[], bool]) -> None:
        """Wait until training has begun, and then for the moment; a negative one is before that."""
        end = time.monotonic() + 120
        while kill.after >= 0 and not has_begun() and job.process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(abs(kill.after))
        ranks = job.workers()
        targets = {"launcher": [job.process.pid], "one rank": ranks[-1:], "all": [*ranks, job.process.pid]}
        for pid in targets[kill.target]:
            with suppress(ProcessLookupError):
                os.kill(pid, kill.number)

    def wrong_end(self, folder: Path, kill: Kill) -> str | None:
        if kill.status == TIMED_OUT:
            return f"not over after {LIMIT} s: {said(folder)[-2000:]}"
        if kill.number not in (signal.SIGTERM, signal.SIGHUP) or kill.after < 0 or Path(f"{folder}.result").exists():
            return None
        return None if kill.status == 75 else f"ended with {kill.status}: {said(folder)[-2000:]}"

    def differences(self, folder: Path, reference: Path) -> list[str]:
        found = differences(folder, reference)
        for rank in range(1, self.variant.processes):
            mine, whole = (result(Path(f"{each}-rank{rank}"))["same"] for each in (folder, reference))
            found += [f"{name} of rank {rank}" for name in ("weights", "optimizer") if mine[name] != whole[name]]
        return found


class Runners:
    """A runner for each variant, and the result of its run in peace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = ExitStack()
        self._servers: dict[str, Forks] = {}
        self._references: dict[str, Path] = {}

    def __enter__(self) -> Runners:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def of(self, name: str) -> Runner:
        variant = VARIANTS[name]
        if variant.processes > 1:
            return Launched(variant)
        if variant.module not in self._servers:
            self._servers[variant.module] = server = Forks(variant.module)
            self._open.callback(server.close)
        return Forked(self._servers[variant.module], variant)

    def reference(self, name: str) -> Path:
        if name not in self._references:
            folder = self.folder / f"reference-{len(self._references)}"
            status = self.of(name).run(folder, resume=None)
            assert status == 0, f"{name}: the run in peace ended with {status}: {said(folder)[-3000:]}"
            self._references[name] = folder
        return self._references[name]


@dataclass
class Case:
    """A run with some kills; all that is random about it follows from the seed and its number."""

    number: int
    variant: str
    kills: list[Kill]

    @classmethod
    def of(cls, seed: int, number: int, names: list[str]) -> Case:
        chosen = random.Random(f"{seed} {number}")
        name = chosen.choices(names, [VARIANTS[each].share for each in names])[0]
        return cls(number, name, [_kill(chosen, VARIANTS[name]) for _ in range(chosen.randint(1, 3))])


def _kill(chosen: random.Random, variant: Variant) -> Kill:
    number = chosen.choice(SIGNALS).name
    if variant.processes == 1:
        return Kill(number, "the process", chosen.uniform(0.0, variant.seconds))
    early = chosen.random() < 0.2
    after = -chosen.uniform(0.5, 5.0) if early else chosen.uniform(0.0, variant.seconds)
    return Kill(number, chosen.choice(["launcher", "one rank", "all"]), after)


def outcome(runners: Runners, case: Case, note: Callable[[Kill], None]) -> list[str]:
    """Run the case; returns what went wrong."""
    runner, folder = runners.of(case.variant), runners.folder / f"case-{case.number}"
    reference, wrong = runners.reference(case.variant), []
    for kill in case.kills:
        kill.status = runner.run(folder, kill=kill)
        note(kill)
        problem = runner.wrong_end(folder, kill)
        wrong += [f"{kill.signal} to {kill.target}: {problem}"] if problem else []
        if kill.status == 0 and Path(f"{folder}.result").exists():
            break
    status = runner.run(folder)
    if status != 0:
        wrong.append(f"started again, it ended with {status}: {said(folder)[-3000:]}")
    else:
        wrong += runner.differences(folder, reference)
        wrong += [f"left over: {name}" for name in [*leftovers(folder), *locks(folder)]]
    wrong += [f"process {pid} is left" for pid in ended(str(folder))]
    for path in folder.parent.glob(f"{folder.name}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return wrong


def locks(folder: Path) -> list[str]:
    """Lock files in the folder of a run that has ended."""
    return sorted(path.name for path in folder.iterdir() if "lock" in path.name)


def ended(mark: str) -> list[int]:
    """The processes of a case that are still there some seconds after it; they are killed."""
    end = time.monotonic() + 10
    while (left := list(marked(mark))) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def marked(mark: str) -> Iterator[int]:
    """The processes with this value of MARK in their environment."""
    wanted = f"{MARK}={mark}".encode()
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and int(place.name) != os.getpid():
            with suppress(OSError):
                if wanted in (place / "environ").read_bytes().split(b"\0"):
                    yield int(place.name)


def available() -> list[str]:
    """The variants that can be run here."""
    missing = find_spec("tensorflow") is None
    return [name for name, each in VARIANTS.items() if not (missing and each.module.endswith("tf_runs"))]


class Campaign:
    """Cases one after the other, written to a file from which it goes on."""

    def __init__(self, seed: int, file: Path, names: list[str]) -> None:
        self.seed, self.file, self.names = seed, file, names

    def run(self, kills: int, seconds: float) -> dict[str, Any]:
        """Run cases until there are enough kills or the time is over; returns the summary."""
        end = time.monotonic() + seconds
        number = len(self._cases())
        with tempfile.TemporaryDirectory(prefix="kills-") as folder, open(self.file, "a", encoding="utf-8") as out:
            with Runners(Path(folder)) as runners:
                while self.summary()["kills"] < kills and time.monotonic() < end:
                    self._one(runners, Case.of(self.seed, number, self.names), out)
                    number += 1
        return self.summary()

    def _one(self, runners: Runners, case: Case, out: TextIO) -> None:
        place = {"seed": self.seed, "case": case.number, "variant": case.variant}
        sent: list[Kill] = []

        def note(kill: Kill) -> None:
            sent.append(kill)
            print(json.dumps({**place, "kill": asdict(kill)}), file=out, flush=True)

        try:
            wrong = outcome(runners, case, note)
        except AssertionError as error:  # a server died, or the run in peace failed
            wrong = [str(error)]
        print(json.dumps({**place, "kills": len(sent), "wrong": wrong}), file=out, flush=True)

    def _cases(self) -> list[dict[str, Any]]:
        """The finished cases of this seed."""
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row for row in rows if row["seed"] == self.seed and "wrong" in row]

    def summary(self) -> dict[str, Any]:
        cases = self._cases()
        by_variant = {name: sum(row["kills"] for row in cases if row["variant"] == name) for name in self.names}
        wrong = [{name: row[name] for name in ("case", "variant", "wrong")} for row in cases if row["wrong"]]
        return {"cases": len(cases), "kills": sum(by_variant.values()), "by variant": by_variant, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="how many in all, with those already in the file")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, default=Path("kills.jsonl"), help="file of results (default: %(default)s)")
    parser.add_argument("--variant", action="append", choices=available(), help="only these; may be repeated")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background processes that ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this one
    done = Campaign(options.seed, options.to, options.variant or available()).run(options.kills, options.minutes * 60)
    print(json.dumps(done, indent=1))
    sys.exit(1 if done["wrong"] else 0)


if __name__ == "__main__":
    main()

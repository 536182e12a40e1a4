"""`loopwright drill -- python train.py ...`: run the user's training under injected faults and report what survived.

Every case runs the script in a separate process (`drill/drill_child.py`) with an injected fault, restarts it until it
finishes, and compares the weights with those of a run without faults.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ArgumentsError, CheckpointError
from ...notices import Notices
from ..drill.drill_child import OUTPUT
from ..drill.processes import Anew, Launcher, Warm
from ..drill.verdicts import CASES, Attempt, VerdictRow, is_hopeless, judge, table
from ..json_output import add_json, show
from ..script import Script, script_in, split_at_dashes

FEWEST_STEPS = 10
RESTARTS = 3
"""Restarts before a run counts as not finished."""
SAVES = 10
"""Checkpoints in a run; some of them come before any fault."""
QUIET_SAVES = 4
"""Checkpoints before a fault is injected, so that starting from scratch exceeds the allowed loss of every case."""


@dataclass
class Drill:
    """One drill of one script."""

    script: Script
    launcher: Launcher
    home: Path
    steps: int
    timeout: float
    seed: int
    keep: bool = False
    reference: Attempt = field(default_factory=lambda: Attempt(None, []))

    @property
    def save_every(self) -> int:
        return max(1, self.steps // SAVES)

    def undisturbed(self, name: str = "undisturbed") -> Attempt:
        """The run without a fault."""
        attempt = self._start("none", self.home / name, at=0, number=1, deadline=time.monotonic() + self.timeout)
        shutil.rmtree(self.home / name / OUTPUT, ignore_errors=True)
        return attempt

    def attempts(self, name: str) -> list[Attempt]:
        """The run with the fault and its restarts, until it finishes."""
        folder, deadline = self.home / name, time.monotonic() + self.timeout
        fault = CASES[name].fault or name
        attempts = [self._start(fault, folder, at=self._moment(name), number=1, deadline=deadline)]
        while not attempts[-1].finished and not is_hopeless(attempts) and len(attempts) <= RESTARTS:
            if len(attempts) == 1 and name in DAMAGES:
                damage_newest(folder / OUTPUT, DAMAGES[name])
            attempts.append(self._start("none", folder, at=0, number=len(attempts) + 1, deadline=deadline))
        return attempts

    def _moment(self, name: str) -> int:
        """The step at which the fault is injected; disk faults are injected during a save."""
        chosen = random.Random(f"{self.seed} {name}")
        if name in ("kill-in-save", "full-disk", "slow-disk"):
            return chosen.randrange(QUIET_SAVES, self.steps // self.save_every - 2) * self.save_every
        return chosen.randrange(QUIET_SAVES * self.save_every, self.steps - 1)

    def _start(self, fault: str, folder: Path, *, at: int, number: int, deadline: float) -> Attempt:
        folder.mkdir(parents=True, exist_ok=True)
        journal, log = folder / f"journal-{number}.jsonl", folder / f"log-{number}.txt"
        log.touch()
        values = {"--folder": folder, "--journal": journal, "--steps": self.steps, "--save-every": self.save_every,
                  "--at": at, "--seed": self.seed}  # fmt: skip
        words = [str(word) for pair in values.items() for word in pair]
        code = self.launcher.run([fault, *words, "--", "python", *self.script.as_words()], log, deadline)
        return Attempt(code, _journal(journal), log.read_text(encoding="utf-8", errors="replace"))

    def row(self, name: str, attempts: list[Attempt], *, comparable: bool = True) -> VerdictRow:
        """The verdict on a case."""
        damage = damaged(self.home / name / OUTPUT)
        return judge(name, attempts, self.reference, save_every=self.save_every, comparable=comparable, damage=damage)


def _journal(path: Path) -> list[dict[str, Any]]:
    """The entries of the process's journal; an incomplete last line (after a kill) is skipped."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


# ---- checkpoints, seen from outside ----------------------------------------------------------------------------------


def cut_short(path: Path) -> None:
    """Truncate a file to its first half."""
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    with open(path, "rb+") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


DAMAGES: dict[str, Callable[[Path], None]] = {"truncated": cut_short, "bit-flip": flip_bit}


def damage_newest(folder: Path, how: Callable[[Path], None]) -> None:
    """Damage the largest file of the newest complete checkpoint, if there is one."""
    complete = _manager(folder).complete()
    if complete:
        files = [path for path in Path(complete[max(complete)]).rglob("*") if path.is_file()]
        how(max(files, key=lambda path: path.stat().st_size))


def damaged(folder: Path) -> str | None:
    """Problems of the checkpoints at the end of a run: each complete one must be intact."""
    manager = _manager(folder)
    for path in manager.complete().values():
        try:
            manager.find(str(path))
        except CheckpointError as error:
            return str(error)
    return None


def _manager(folder: Path) -> Any:
    from ...core.checkpoint.manager import CheckpointManager

    return CheckpointManager(folder, notices=Notices(quiet=True))


# ---- the command -----------------------------------------------------------------------------------------------------


def run(words: list[str]) -> int:
    """Run a drill; 0 if every case survived, 1 if not, 2 for invalid input."""
    own, command = split_at_dashes(words)
    options = _parser().parse_args(own)
    names = _chosen(options.only)
    if options.steps < FEWEST_STEPS:
        raise ArgumentsError(f"--steps {options.steps} is too short for a drill; use at least {FEWEST_STEPS}")
    script = script_in(command)
    home = Path(tempfile.mkdtemp(prefix="loopwright-drill-"))
    launcher = (Warm if options.warm else Anew)(script.python)
    drill = Drill(script, launcher, home, options.steps, options.timeout, options.seed, options.keep)
    try:
        with launcher:
            _rehearse(drill)
            rows = _all_rows(drill, names)
    except BaseException:  # also Ctrl-C: remove the folder and raise again
        shutil.rmtree(home, ignore_errors=True)
        raise
    return _end(drill, rows, options)


def _parser() -> argparse.ArgumentParser:
    cases = "\n".join(f"  {name:<14} {case.help}" for name, case in CASES.items())
    parser = argparse.ArgumentParser(
        "loopwright drill",
        usage="loopwright drill [options] -- python train.py ...",
        description="Run a training script under injected faults and report what survived.",
        epilog=f"cases:\n{cases}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=30, help="length of the runs in steps (30)")
    parser.add_argument("--only", help="cases to run, separated by commas; all by default")
    parser.add_argument("--timeout", type=float, default=600, help="timeout of a case in seconds (600)")
    parser.add_argument("--seed", type=int, default=0, help="seed that decides when faults are injected (0)")
    parser.add_argument("--warm", action="store_true", help="fork runs from a process that has imported torch (faster)")
    parser.add_argument("--keep", action="store_true", help="keep the journals, logs and checkpoints of every case")
    add_json(parser)
    return parser


def _chosen(only: str | None) -> list[str]:
    names = list(CASES) if only is None else [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in CASES]
    if unknown or not names:
        raise ArgumentsError(f"--only {only}: available cases are {', '.join(CASES)}")
    return names


def _rehearse(drill: Drill) -> None:
    """Run the script without faults; every case is compared with its result."""
    _say("undisturbed")
    attempt = drill.undisturbed()
    if not attempt.finished:
        tail = "\n".join(attempt.text.splitlines()[-15:])
        reason = attempt.outcome() if attempt.code != 0 else "exited without calling train() of a loopwright trainer"
        raise ArgumentsError(f"{drill.script.target} did not finish training without faults ({reason}):\n{tail}")
    if attempt.reached < FEWEST_STEPS:
        raise ArgumentsError(f"training ended after {attempt.reached} steps; a drill needs {FEWEST_STEPS}")
    drill.reference, drill.steps = attempt, attempt.reached


def _all_rows(drill: Drill, names: list[str]) -> list[VerdictRow]:
    attempts = {}
    rows = {}
    for name in names:
        _say(f"{name}: {CASES[name].help}")
        attempts[name] = drill.attempts(name)
        rows[name] = drill.row(name, attempts[name])
        if rows[name].survived != "no" and not drill.keep:
            shutil.rmtree(drill.home / name / OUTPUT, ignore_errors=True)
    if any(row.same == "no" for row in rows.values()) and drill.undisturbed("again").weights != drill.reference.weights:
        _say(
            "two runs without faults end with different weights, so weights are not compared; try full_determinism=True"
        )
        rows = {name: drill.row(name, attempts[name], comparable=False) for name in names}
    return list(rows.values())


def _end(drill: Drill, rows: list[VerdictRow], options: argparse.Namespace) -> int:
    failed = [row.name for row in rows if row.survived == "no"]
    asked = [row.name for row in rows if row.survived == "as requested"]
    keeps = bool(failed) or drill.keep
    if not keeps:
        shutil.rmtree(drill.home, ignore_errors=True)
    verdict = f"not survived: {', '.join(failed)}" if failed else "everything survived"
    verdict += f"; only as requested: {', '.join(asked)}" if asked else ""
    where = f"journals and logs are in {drill.home}\n" if keeps else ""
    cases = [dataclasses.asdict(row) for row in rows]
    show(options, {"cases": cases, "folder": drill.home if keeps else None}, f"{table(rows)}\n{where}{verdict}")
    return 1 if failed else 0


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)

"""Files of an output folder beside its checkpoints, with other contents: who owns it, which run it is, how it began.

A run that resumes there stops with an error that names the file, or is the run that was saved.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core.numpy_runs import outcome, trainer_of
from core.tampering import VALUES, WHOLE, cases, changed, paths_in

from loopwright.core.checkpoint.ownership.claim import decoded, own_claim
from loopwright.core.checkpoint.ownership.lock_file import LOCK
from loopwright.core.checkpoint.ownership.run_id import FILE as CURRENT
from loopwright.core.resuming.run_record import FILE as RECORD, read_record
from loopwright.errors import CheckpointError, LoopwrightError

METRICS = "metrics.jsonl"
FREE = re.compile(
    r"current_run\.json: run (null|a string)|metrics\.jsonl: row 1 (empty|step (negative|huge)|loss missing)"
)
"""Another valid run, which has no checkpoints here, and rows that are as good as those that were written."""


def make(folder: Path) -> Any:
    return trainer_of(folder, save_strategy="steps", save_steps=4, async_save=False, max_steps=6, logging_steps=1)


def computed(folder: Path, trainer: Any) -> str:
    found = outcome(trainer)
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    kept = {name: found[name] for name in ("weights", "velocity", "learning_rate", "random")}
    return json.dumps({**kept, "steps": steps}, sort_keys=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that was killed after the checkpoint of step 4, and what it would have become."""
    folder = tmp_path_factory.mktemp("records") / "run"
    whole = make(folder)
    whole.train()
    expected = computed(folder, whole)
    shutil.rmtree(folder / "checkpoint-6")
    dead = own_claim("token")
    (folder / LOCK).write_bytes(json.dumps({**vars(dead), "pid": 2**22 + 1}).encode())
    (folder / RECORD).write_text(json.dumps({"argv": ["train.py"], "command": ["python", "train.py"], "folder": "/"}))
    return folder, expected


def rows_of_metrics(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The last row and one in the middle, changed in every way."""
    lines = (folder / METRICS).read_bytes().splitlines()
    for index in (1, len(lines) - 1):
        row = json.loads(lines[index])
        ways = [(name, change(lines[index])) for name, change in WHOLE.items()]
        ways += [
            (f"{'.'.join(map(str, path))} {name}", content)
            for path in paths_in(row)
            for name, value in VALUES.items()
            if (content := changed(row, path, value)) is not None
        ]
        for name, content in ways:
            yield f"{METRICS}: row {index} {name}", b"\n".join([*lines[:index], content, *lines[index + 1 :]]) + b"\n"


def all_cases(folder: Path) -> list[tuple[str, str, bytes]]:
    found = [(name, *case) for name in (CURRENT, LOCK, RECORD) for case in cases(folder, name)]
    return [*found, *((METRICS, *case) for case in rows_of_metrics(folder))]


def wrong(saved: tuple[Path, str], place: Path, caplog: Any, *, first: int, step: int) -> dict[str, str]:
    found = {}
    for name, case, content in all_cases(saved[0])[first::step]:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(saved[0], place)
        (place / name).write_bytes(content)
        os.utime(place / name, (1e9, 1e9))  # no sign of life for a long time
        caplog.clear()
        trainer = make(place)
        try:
            read_record(place)
            trainer.train(resume_from_checkpoint=True)
        except LoopwrightError as error:
            if name not in str(error) and not FREE.fullmatch(case):
                found[case] = f"the error does not name the file: {error}"
        except Exception as error:
            found[case] = f"{type(error).__name__}: {error}"
        else:
            if computed(place, trainer) != saved[1] and not FREE.fullmatch(case) and name not in caplog.text:
                found[case] = "trained on silently, with other numbers"
    return found


def test_some_changes_of_records(saved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert wrong(saved, tmp_path / "run", caplog, first=10, step=41) == {}


@pytest.mark.grid
@pytest.mark.slow
def test_all_changes_of_records(saved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert wrong(saved, tmp_path / "run", caplog, first=0, step=1) == {}


KINDS: dict[str, Any] = {
    "a folder": lambda path: path.mkdir(),
    "a named pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to(path.parent / "nothing"),
    "20 GB of zeros": lambda path: (path.touch(), os.truncate(path, 20 << 30)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [CURRENT, LOCK, METRICS])
def test_what_stands_in_the_place_of_a_record(
    name: str, kind: str, saved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused or reported by its name, and nothing waits for a writer or a reader."""
    if name == METRICS and kind in ("a link to nothing", "20 GB of zeros"):
        pytest.skip("a file elsewhere, or one of other contents")
    place = tmp_path / "run"
    shutil.copytree(saved[0], place)
    (place / name).unlink()
    KINDS[kind](place / name)
    trainer = make(place)
    try:
        trainer.train(resume_from_checkpoint="auto")
    except LoopwrightError as error:
        assert name in str(error)
    else:
        assert computed(place, trainer) == saved[1] and (name in caplog.text or name == LOCK)
        assert name != LOCK or "cannot be locked" in caplog.text or not os.path.lexists(place / name)


@pytest.mark.parametrize("request_", [4, 1, 0, 1.5, "", b"checkpoint-4", ["checkpoint-4"], {"auto"}, "x" * 5000])
def test_a_request_that_is_no_checkpoint_is_refused(request_: Any, saved: Any, tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(saved[0], place)
    with pytest.raises(CheckpointError, match="resume_from_checkpoint=|File name too long"):
        make(place).train(resume_from_checkpoint=request_)


def test_a_claim_is_a_claim_or_none(saved: Any) -> None:
    """Without flock its values decide whether the owner lives."""
    for _, case, content in all_cases(saved[0]):
        claim = decoded(content) if case.startswith(LOCK) else None
        if claim is not None:
            assert claim.has_ended() in (True, False, None) and claim.name, case

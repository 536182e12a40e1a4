"""The training process of `loopwright drill`: the user's script with an injected fault and a redirected output.

It writes a journal, one JSON object per line: the first step, each finished step, the fault, and at the end a digest
of model and optimizer. The script is ended as soon as `train()` returns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.events import TrainerCallback
from ..commands.replay import INERT
from ..script import adjusted_trainers, script_in, split_at_dashes, without_reporters
from .faults import FAULTS, Fault, Moment
from .processes import NURSERY, nurse

if TYPE_CHECKING:
    from ...args.base import BaseArguments

OUTPUT = "run"
KEPT = 3
"""Checkpoints kept when the user's arguments set no limit."""
FACTS = ("on_nonfinite", "auto_find_batch_size", "enable_jit_checkpoint")
"""Arguments that decide whether a case counts as survived."""


class Finished(BaseException):
    """Raised to end the user's script after training; not an Exception, so that scripts do not catch it."""


class Journal:
    """Appends entries to a file; each is written at once, so that a kill does not lose it."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, event: str, **values: Any) -> None:
        os.write(self._file, (json.dumps({"event": event, **values}) + "\n").encode())


class Witness(TrainerCallback):
    """Records the steps and notifies the fault when they begin."""

    def __init__(self, trainer: Any, journal: Journal, fault: Fault) -> None:
        self._trainer, self._journal, self._fault = trainer, journal, fault
        self._began, self._first = 0.0, 0

    def on_train_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._began, self._first = time.monotonic(), state.global_step
        facts = {name: getattr(args, name, None) for name in FACTS}
        self._journal.note("begin", step=state.global_step, facts=facts)

    def on_step_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        done = state.global_step - self._first
        seconds = (time.monotonic() - self._began) / done if done else 0.0
        self._fault.step_begins(self._trainer, state.global_step + 1, seconds)

    def on_step_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._journal.note("step", step=state.global_step)


def main(words: list[str]) -> int:
    own, command = split_at_dashes(words)
    options = _options(own)
    folder = Path(options.folder).resolve()
    journal = Journal(options.journal)
    fault = FAULTS[options.fault](
        Moment(
            options.at,
            options.save_every,
            options.seed,
            output=folder / OUTPUT,
            tell=lambda what: journal.note("fault", what=what),
        )
    )
    script = script_in(command)
    fault.install()
    _end_after_training(journal)

    def adjust(trainer: Any, args: BaseArguments, callbacks: list[Any]) -> list[Any]:
        _shorten(args, options, folder / OUTPUT)
        trainer._loopwright.resume_request = lambda *request: "auto"
        return [*without_reporters(callbacks), Witness(trainer, journal, fault)]

    with suppress(Finished), adjusted_trainers(adjust):
        script.run()
    return 0


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("loopwright.cli.drill.drill_child")
    parser.add_argument("fault", choices=FAULTS)
    for name in ("--folder", "--journal"):
        parser.add_argument(name, required=True)
    for name in ("--steps", "--save-every", "--at", "--seed"):
        parser.add_argument(name, type=int, required=True)
    return parser.parse_args(words)


def _shorten(args: BaseArguments, options: argparse.Namespace, output: Path) -> None:
    """Make the run short, with frequent checkpoints, in a separate folder."""
    asked = args.max_steps if args.max_steps > 0 else options.steps
    changes = {
        **INERT,
        "output_dir": str(output),
        "max_steps": min(asked, options.steps),
        "save_strategy": "steps",
        "save_steps": options.save_every,
        "save_total_limit": args.save_total_limit or KEPT,
    }
    for name, value in changes.items():
        setattr(args, name, value)


def _end_after_training(journal: Journal) -> None:
    """Make `train()` write the digest to the journal and end the script."""
    from ...core.internals import Internals

    original = Internals.train

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        original(self, *args, **kwargs)
        journal.note("end", step=self.state.global_step, **digest(self.trainer))
        raise Finished

    Internals.train = train  # type: ignore[method-assign]


def digest(trainer: Any) -> dict[str, Any]:
    """Hashes of model and optimizer, bit for bit, and whether both are finite."""
    import torch

    from ...pt.checkpoint.tensors import encode_optimizer, plain_module

    module = plain_module(trainer.model)
    weights = module.state_dict()
    described, tensors = encode_optimizer(trainer.optimizer, module)
    both = [*weights.values(), *tensors.values()]
    floating = [each for each in both if torch.is_tensor(each) and each.is_floating_point()]
    return {
        "model": _hash(weights),
        "optimizer": _hash(tensors, json.dumps(described, sort_keys=True)),
        "finite": all(bool(torch.isfinite(each).all()) for each in floating),
    }


def _hash(tensors: dict[str, Any], text: str = "") -> str:
    import torch

    found = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        if not torch.is_tensor(tensor):
            continue
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    sys.exit(main(nurse() if sys.argv[1:] == [NURSERY] else sys.argv[1:]))

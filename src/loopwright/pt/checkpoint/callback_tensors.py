"""Tensors of callbacks in checkpoints, such as averaged weights.

A callback with `checkpoint_tensors(model)` returns its tensors by name; they are saved, and filled by a resumed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.state import TrainerState, restore_callback_states
from .shards import BoxReader, copy_part
from .tensors import write_tensors

STEM = "callbacks"
Write = Callable[[Path], Any]


def tensors_of(callbacks: Iterable[Any], model: nn.Module) -> dict[str, Tensor]:
    """The tensors of all callbacks that have any, by class and name; a second one of a class has a number."""
    found: dict[str, Tensor] = {}
    seen: dict[str, int] = {}
    for callback in callbacks:
        if callable(getattr(callback, "checkpoint_tensors", None)):
            kind = type(callback).__name__
            seen[kind] = seen.get(kind, 0) + 1
            place = kind if seen[kind] == 1 else f"{kind}-{seen[kind]}"
            found.update({f"{place}/{name}": each for name, each in callback.checkpoint_tensors(model).items()})
    return found


def whole_writer(tensors: dict[str, Tensor], keep: Any) -> Write:
    """Writes all tensors into one file."""
    kept = keep({f"{STEM}/{name}": each for name, each in tensors.items()})
    return lambda folder: write_tensors(
        folder / f"{STEM}.safetensors", {name.removeprefix(f"{STEM}/"): each for name, each in kept.items()}
    )


def load_tensors(folder: Path, tensors: dict[str, Tensor], tell: Callable[[str], None]) -> None:
    """Fill the tensors of callbacks from a checkpoint; those it does not have are reported and unchanged."""
    if not tensors:
        return
    missing = list(tensors)
    if any(folder.glob(f"{STEM}*.safetensors")):
        with BoxReader(folder, STEM).opened() as reader, torch.no_grad():
            missing = [name for name in tensors if name not in reader]
            for name, tensor in tensors.items():
                if name in reader:
                    copy_part(tensor, name, reader)
    if missing:
        tell(
            f"{folder.name} has no {missing[0]}, {len(missing)} in all, of the callbacks of this run; they begin with "
            "the weights of the checkpoint"
        )


def restore_with_tensors(callbacks: Iterable[Any], saved: TrainerState) -> None:
    """Restore the state of those callbacks that have tensors, and of no other."""
    own = [callback for callback in callbacks if callable(getattr(callback, "checkpoint_tensors", None))]
    names = {type(callback).__name__ for callback in own}
    restore_callback_states(own, {name: each for name, each in saved.stateful_callbacks.items() if name in names})


def uses_averages(callback: Any) -> bool:
    """Whether evaluations have the weights of this callback."""
    return bool(getattr(callback, "use_in_evaluation", False)) and bool(getattr(callback, "averaged", 0))


@contextmanager
def evaluation_weights(callbacks: Iterable[Any]) -> Iterator[None]:
    """The weights that callbacks want an evaluation to use."""
    with ExitStack() as stack:
        for callback in callbacks:
            if callable(getattr(callback, "evaluation_weights", None)):
                stack.enter_context(callback.evaluation_weights())
        yield

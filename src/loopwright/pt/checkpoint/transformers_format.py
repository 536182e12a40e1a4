"""transformers' checkpoint files: written with checkpoint_format="transformers", and read to resume from them.

These formats are pickles. They are read with `weights_only=True` and a fixed list of harmless types, so that a
manipulated file cannot execute code.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ...args.base import without_secrets
from ...args.secrets import is_secret
from ...core.checkpoint.folder import OPTIMIZER as NATIVE
from ...errors import CheckpointError
from ..arguments import TrainingArguments
from ..optim.greedy_lr import to_transformers

OPTIMIZER, SCHEDULER, SCALER, RNG = "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth"
ARGUMENTS = "training_args.bin"

HARMLESS = [getattr(np, "_core", np).multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
"""Types in the random state of numpy."""


def foreign_progress(step: int, *, batches_per_epoch: int | None, accumulation: int, batch_size: int) -> dict[str, int]:
    """The position of a transformers run after this many updates."""
    if batches_per_epoch is None:
        epoch, batches = 0, step * accumulation
    else:
        epoch, updates = divmod(step, -(-batches_per_epoch // accumulation))
        batches = updates * accumulation
    return {"epoch": epoch, "batches_in_epoch": batches, "samples_in_epoch": batches * batch_size}


def is_foreign(folder: Path) -> bool:
    """Whether a checkpoint has transformers' optimizer file instead of loopwright's."""
    return (folder / OPTIMIZER).is_file() and not (folder / f"{NATIVE}.json").is_file()


def write_foreign(
    folder: Path,
    *,
    optimizer: Any,
    scheduler: Any,
    scaler: Any,
    rng: dict[str, Any] | None,
    args: TrainingArguments | None,
) -> None:
    """Write everything except weights and trainer_state.json under transformers' names; None is left out."""
    parts = {
        OPTIMIZER: optimizer,
        SCHEDULER: their_schedule(scheduler),
        SCALER: scaler,
        RNG: None if rng is None else _their_rng(rng),
        ARGUMENTS: None if args is None else without_tokens(args),
    }
    for name, values in parts.items():
        if values is not None:
            with open(folder / name, "wb") as file:  # with a path, torch hides the error of a full disk
                torch.save(_in_host_memory(values), file)


def write_arguments(folder: Path, args: TrainingArguments, tell: Callable[[str], None]) -> None:
    """Write training_args.bin; reports arguments that cannot be pickled."""
    content = io.BytesIO()
    try:
        torch.save(without_tokens(args), content)
    except Exception as error:  # values of the user may fail in any way
        tell(f"{ARGUMENTS} is not written: the arguments cannot be pickled ({error})")
        return
    (folder / ARGUMENTS).write_bytes(content.getvalue())


def without_tokens(args: TrainingArguments) -> TrainingArguments:
    """A copy of the arguments without tokens, passwords and the credentials of URLs, also in dicts and lists."""
    found = copy.copy(args)
    for name, value in list(vars(found).items()):
        if is_secret(name):
            object.__setattr__(found, name, None)
        elif isinstance(value, (str, dict, list, tuple)):
            object.__setattr__(found, name, without_secrets(value))
    return found


def _in_host_memory(values: Any) -> Any:
    """Nested values with tensors in host memory, and numbers that can be loaded without numpy's classes."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu()
    if isinstance(values, np.generic):
        return values.item()
    if type(values) is dict:
        return {name: _in_host_memory(each) for name, each in values.items()}
    return type(values)(map(_in_host_memory, values)) if type(values) in (list, tuple) else values


def read_foreign(folder: Path) -> dict[str, Any]:
    """Optimizer, scheduler and scaler of a transformers checkpoint; absent ones are None."""
    found = {
        "optimizer": _read(folder / OPTIMIZER),
        "scheduler": _read(folder / SCHEDULER),
        "scaler": _read(folder / SCALER),
    }
    missing = [name for name in ("optimizer", "scheduler") if found[name] is None]
    if missing:
        raise CheckpointError(
            f"{folder.name} has no {' and no '.join(missing)} state, so it cannot be resumed. Load its weights and "
            "train without resume_from_checkpoint instead"
        )
    return found


def foreign_random_states(folder: Path, rank: int) -> dict[str, Any] | None:
    """The random states of a rank in a transformers checkpoint: several ranks have a file each, a single one RNG."""
    own = folder / RNG.replace(".", f"_{rank}.")
    return _our_rng(_read(own if rank or own.is_file() else folder / RNG))


def in_order(
    saved: dict[str, Any], names: list[list[str]], now: dict[int, str], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """An optimizer's state dict for parameters in their order now, given their names by group in the order then."""
    flat = [name for group in names for name in group]
    if flat == list(now.values()):
        return saved
    if len(names) != len(groups):
        raise CheckpointError(f"the optimizer has {len(groups)} parameter groups, {len(names)} were saved")
    then = {name: index for index, name in enumerate(flat)}
    state = {index: saved["state"][then[name]] for index, name in now.items() if then.get(name) in saved["state"]}
    first, options = 0, []
    for group, old in zip(groups, saved["param_groups"], strict=True):
        options.append({**old, "params": list(range(first, first + len(group["params"])))})
        options[-1].pop("param_names", None)
        first += len(group["params"])
    return {**saved, "state": state, "param_groups": options}


def _read(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return loaded_safely(path)
    except Exception as error:  # unpickling disallowed types raises many exceptions
        raise CheckpointError(
            f"{path} cannot be read safely ({_reason(error)}); it was damaged, or contains objects that are not read"
        ) from error


def _reason(error: Exception) -> str:
    """What torch has found, without its advice to load the file with `weights_only=False`."""
    text = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0][:200]


def loaded_safely(file: Path | IO[bytes]) -> Any:
    """The contents of a pickle of tensors and plain values; raises for one that holds anything else."""
    with torch.serialization.safe_globals(HARMLESS):
        return torch.load(file, map_location="cpu", weights_only=True)


def their_schedule(state: dict[str, Any]) -> dict[str, Any]:
    """The schedule's state with the keys that torch's LambdaLR requires in addition, or those of their GreedyLR."""
    if "attempts_left" in state:
        return to_transformers(state)
    if "base_lrs" not in state or "lr_lambdas" in state:
        return state
    return {**state, "_step_count": state["last_epoch"] + 1, "lr_lambdas": [{} for _ in state["base_lrs"]]}


def _their_rng(rng: dict[str, Any]) -> dict[str, Any]:
    states = {"python": rng["python"], "numpy": rng["numpy"], "cpu": rng["torch"]}
    if rng.get("accelerator"):
        states["cuda"] = rng["accelerator"][0] if len(rng["accelerator"]) == 1 else rng["accelerator"]
    return states


def _our_rng(states: dict[str, Any] | None) -> dict[str, Any] | None:
    if states is None:
        return None
    rng = {"python": states["python"], "numpy": states["numpy"], "torch": states["cpu"]}
    cuda = states.get("cuda")
    if cuda is not None:
        rng["accelerator"] = list(cuda) if isinstance(cuda, (list, tuple)) else [cuda]
    return rng

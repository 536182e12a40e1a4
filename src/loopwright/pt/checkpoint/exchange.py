"""Converting checkpoints without a trainer: from loopwright's own format or Lightning's to that of transformers.

Pickles are read with `weights_only=True`: a manipulated file cannot execute code.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.checkpoint.folder import (
    ARGUMENTS,
    MANIFEST,
    MODEL,
    MODULE,
    OPTIMIZER,
    PINNED,
    RANKS,
    RNG,
    SCALER,
    SCHEDULER,
    STATE,
    WEIGHTS,
)
from ...core.checkpoint.json_files import read_json
from ...core.checkpoint.manifest import damage, describe, read_manifest
from ...core.state import TrainerState
from ...errors import CheckpointError, first_line
from ..rng import rng_from_json
from .described_values import check_plain, decode_value
from .shards import BoxReader
from .tensors import decode_schedule, read_description, write_tensors
from .transformers_format import is_foreign, write_foreign
from .weights import export_writer, is_exported, load_weights

NATIVE = {
    MANIFEST, MODEL, MODULE, WEIGHTS, SCHEDULER, SCALER, RNG, PINNED, ARGUMENTS, f"{OPTIMIZER}.json",
    f"{OPTIMIZER}.safetensors",
}  # fmt: skip
"""Files of a native checkpoint that are converted or have no counterpart; the others are copied."""


def to_transformers(source: Path, out: Path, *, prefix: str = "") -> list[str]:
    """Write a checkpoint in transformers' format to a new folder; returns what it does not contain.

    `source` is a checkpoint of loopwright or a `.ckpt` file of Lightning, whose names lose the `prefix`.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists already; give the name of a new folder")
    is_file = source.is_file()
    if not is_file:
        _check_native(source)
    out.mkdir(parents=True)
    try:
        missing = _from_lightning(source, out, prefix) if is_file else _from_native(source, out)
        describe(out, TrainerState.load_from_json(str(out / STATE)).global_step, format="transformers").write(out)
    except BaseException:  # also after Ctrl-C: all or nothing
        shutil.rmtree(out, ignore_errors=True)
        raise
    return missing


# ---- loopwright's own -----------------------------------------------------------------------------------------------


def _check_native(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist; give the folder of a checkpoint, or a .ckpt file of Lightning")
    if is_foreign(folder):
        raise CheckpointError(f"{folder} is a checkpoint of transformers already")
    manifest = read_manifest(folder)
    if manifest is None:
        raise CheckpointError(f"{folder} has no intact {MANIFEST}, so it is not a complete checkpoint of loopwright")
    problem = damage(folder, manifest)
    if problem is not None:
        raise CheckpointError(f"{folder} is damaged: {problem}; convert another checkpoint")
    if not (folder / f"{OPTIMIZER}.json").is_file():
        raise CheckpointError(
            f"{folder} has no {OPTIMIZER}.json: it was saved with save_only_model=True or by DeepSpeed, and "
            "transformers could not resume from it"
        )


def _from_native(folder: Path, out: Path) -> list[str]:
    for path in folder.iterdir():
        if path.is_file() and path.name not in NATIVE and path.suffix != ".safetensors":
            shutil.copyfile(path, out / path.name)
    _export_weights(folder, out)
    with BoxReader(folder, OPTIMIZER).opened() as reader:
        names = list(reader.names())
        described, tensors = read_description(folder, names), {name: reader.whole(name) for name in names}
    scaler = folder / SCALER
    write_foreign(
        out,
        optimizer=_plain_optimizer(described, tensors),
        scheduler=decode_schedule(read_json(folder / SCHEDULER)),
        scaler=read_json(scaler) if scaler.is_file() else None,
        rng=rng_from_json(read_json(folder / RNG)),
        args=None,
    )
    return ["random states of ranks other than the first"] if (folder / RANKS).is_dir() else []


def _plain_optimizer(described: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A described state as the optimizer's own `state_dict()`: parameters are numbered in the order of its groups."""
    check_plain(described)
    names = [name for group in described["groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [
        {
            **{key: decode_value(value, tensors) for key, value in group["options"].items()},
            "params": [numbers[name] for name in group["params"]],
        }
        for group in described["groups"]
    ]
    state = {
        numbers.get(name, name): {slot: decode_value(value, tensors) for slot, value in slots.items()}
        for name, slots in described["state"].items()
    }
    extra = {key: decode_value(value, tensors) for key, value in described.get("extra", {}).items()}
    return {"state": state, "param_groups": groups, **extra}


def _export_weights(folder: Path, out: Path) -> None:
    """Write the weights as `save_pretrained` would, if the folder has the configuration of a transformers model."""
    kind = _architecture(folder)
    if kind is not None and not is_exported(folder):
        model = kind(kind.config_class.from_pretrained(folder))
        load_weights(model, folder)
        export_writer(model, model.state_dict())(out)
        return
    with BoxReader(folder, "model").opened() as reader:
        write_tensors(out / MODEL, {name: reader.whole(name) for name in reader.names()})


def _architecture(folder: Path) -> Any:
    """The model class that config.json names, if it is one of transformers' own; code in the folder is not run."""
    config = folder / "config.json"
    if not config.is_file():
        return None
    names = read_json(config).get("architectures") or []
    import transformers

    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise CheckpointError(
            f"{config} names {names or 'no architecture'}, which transformers does not have; save with "
            "checkpoint_format='transformers' in the run itself"
        )
    return kind


# ---- Lightning ------------------------------------------------------------------------------------------------------


def _from_lightning(path: Path, out: Path, prefix: str) -> list[str]:
    found = _lightning_file(path)
    weights = {_without(name, prefix): tensor for name, tensor in found["state_dict"].items()}
    write_tensors(out / MODEL, weights)
    optimizers, step = found.get("optimizer_states") or [], int(found["global_step"])
    if len(optimizers) != 1:
        raise CheckpointError(
            f"{path} has the states of {len(optimizers)} optimizers, and a checkpoint has one; its weights can be read "
            "with torch.load(..., weights_only=True)['state_dict']"
        )
    rates = [group["lr"] for group in optimizers[0]["param_groups"]]
    schedules = found.get("lr_schedulers") or [_constant(step, rates)]
    write_foreign(out, optimizer=optimizers[0], scheduler=schedules[0], scaler=None, rng=None, args=None)
    state = TrainerState(epoch=float(found.get("epoch", 0)), global_step=step)
    state.save_to_json(str(out / STATE))
    known = {"state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "pytorch-lightning_version"}
    return [f"{name} of Lightning" for name in sorted(found.keys() - known) if found[name]] + ["random states"]


def _lightning_file(path: Path) -> dict[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling disallowed types raises many exceptions
        raise CheckpointError(
            f"{path} cannot be read safely: {first_line(error)}. Save it again without objects in "
            "hyper_parameters and callbacks"
        ) from error
    is_known = isinstance(found, Mapping) and {"state_dict", "global_step"} <= found.keys()
    if not is_known or not all(isinstance(each, Tensor) for each in found["state_dict"].values()):
        raise CheckpointError(f"{path} is not a checkpoint of Lightning: it has no state_dict and global_step")
    return dict(found)


def _without(name: str, prefix: str) -> str:
    if not name.startswith(prefix):
        raise CheckpointError(f"the tensor {name} does not begin with prefix={prefix!r}; check the names of the model")
    return name.removeprefix(prefix)


def _constant(step: int, rates: list[float]) -> dict[str, Any]:
    """The state of a constant schedule: that of a Lightning run without one."""
    return {"base_lrs": rates, "last_epoch": step, "_last_lr": rates}

"""Arguments of distributed training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import NotAvailable
from ..field import Group, arg, configuration, names_or_flag, nearest, positive


@dataclass
class DistributedArgs(Group):
    """Arguments of distributed training: DDP, FSDP, DeepSpeed, parallel dimensions."""

    title = "Many processes"

    ddp_find_unused_parameters: bool | None = arg(None, "DDP: search for parameters that received no gradient.")
    ddp_bucket_cap_mb: int | None = arg(None, "DDP: size of a gradient bucket in MiB.", check=positive)
    ddp_broadcast_buffers: bool | None = arg(None, "DDP: broadcast buffers from rank 0.")
    ddp_static_graph: bool | None = arg(None, "DDP: promise that every step uses the same parameters.")
    ddp_backend: str | None = arg(
        None,
        "The communication backend between processes.",
        choices=("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"),
    )
    ddp_timeout: int = arg(1800, "Timeout in seconds for collective operations.", check=positive)
    fsdp: str | None = arg(
        None, "Shard parameters across ranks with FSDP.", as_given=True, nargs="?", const=True, check=names_or_flag
    )
    fsdp_config: dict[str, Any] | str | None = arg(
        None, "FSDP options, as a dict, JSON or the path of a JSON file.", check=configuration
    )
    deepspeed: dict[str, Any] | str | None = arg(
        None, "DeepSpeed configuration, as a dict, JSON or the path of a JSON file.", check=configuration
    )
    accelerator_config: dict[str, Any] | str | AcceleratorConfig | None = arg(
        None, "How batches are distributed and copied: a dict with the keys of AcceleratorConfig, JSON or a JSON file."
    )
    parallelism_config: dict[str, Any] | str | None = arg(
        None, "Sizes of the parallel dimensions.", check=configuration
    )


@dataclass
class AcceleratorConfig:
    """How batches are distributed across ranks and copied to the device."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_accelerator_config(given: Any) -> AcceleratorConfig:
    """The configuration from a mapping or from an object with the same attributes; the default for None."""
    if given is None or isinstance(given, AcceleratorConfig):
        return given or AcceleratorConfig()
    if isinstance(given, type):
        raise NotAvailable(
            f"Tried passing in a callable to `accelerator_config`: the class {given.__name__}; pass an instance, "
            f"{given.__name__}(...)"
        )
    values = given.to_dict() if hasattr(given, "to_dict") else given
    if not isinstance(values, Mapping):
        raise ValueError(f"{given!r} is not a dict with the keys of AcceleratorConfig")
    known = [field.name for field in dataclasses.fields(AcceleratorConfig)]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ValueError(f"has no key {unknown[0]!r}{nearest(unknown[0], known)} (keys: {', '.join(known)})")
    return AcceleratorConfig(**values)


UNSUITED: dict[str, tuple[Any, str]] = {
    "split_batches": (True, "per_device_train_batch_size is always per rank; divide it yourself"),
    "dispatch_batches": (True, "every rank loads its own batches; leave it at None"),
}
"""Keys with a value that cannot be honoured with several processes, and why; with one they change nothing."""

ACCUMULATION = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
"""Keys of gradient_accumulation_kwargs."""


def unsuited(config: AcceleratorConfig, *, one_process: bool) -> list[str]:
    """Problems of a configuration: settings that are not supported."""
    refused = {} if one_process else UNSUITED
    found = [f"{key}={value!r}: {why}" for key, (value, why) in refused.items() if getattr(config, key) == value]
    kwargs = config.gradient_accumulation_kwargs or {}
    found += [
        f"gradient_accumulation_kwargs has no key {key!r}{nearest(key, ACCUMULATION)} (keys: {', '.join(ACCUMULATION)})"
        for key in kwargs
        if key not in ACCUMULATION
    ]
    if kwargs.get("sync_each_batch") and not one_process:
        found.append("sync_each_batch=True: gradients are reduced once per update; remove it")
    return found

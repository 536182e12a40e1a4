"""Parsing of `fsdp`, `fsdp_config` and `parallelism_config`, in every supported form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..field import nearest
from ..groups.distributed import DistributedArgs

WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
DTYPES = ("float32", "bfloat16", "float16", "float64")
OLD_WORDS = {
    "full_shard": {},
    "auto_wrap": {},
    "hybrid_shard": {"hybrid": True},
    "shard_grad_op": {"reshard_after_forward": False},
    "hybrid_shard_zero2": {"hybrid": True, "reshard_after_forward": False},
    "offload": {"cpu_offload": True},
}
"""Options of the string form of `fsdp`, and their meaning."""

GONE = {
    "forward_prefetch": "FSDP2 prefetches automatically",
    "backward_prefetch": "FSDP2 prefetches automatically",
    "use_orig_params": "FSDP2 always keeps the original parameters",
    "sync_module_states": "weights that only rank 0 has are always broadcast",
    "limit_all_gathers": "FSDP2 limits all-gathers automatically",
}
"""Keys of FSDP1 and why they are not needed; they are accepted with a warning."""

XLA = ("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt")
NOT_ON = {"no_shard": "is DistributedDataParallel; remove fsdp"}


@dataclass(frozen=True)
class FsdpOptions:
    """How a model is sharded."""

    reshard_after_forward: bool | int = True
    cpu_offload: bool = False
    activation_checkpointing: bool = False
    cpu_ram_efficient_loading: bool = False
    whole_checkpoints: bool = False
    """Whether checkpoints contain full tensors (FULL_STATE_DICT) instead of one shard per rank."""
    wrap: str = WRAPS[0]
    layer_classes: tuple[str, ...] = ()
    min_num_params: int = 0
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    hybrid: bool = False


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the parallel dimensions; their product is the world size."""

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    sp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    tp_plan: Mapping[str, str] | None = None
    """Name pattern -> colwise, rowwise ..., for models without a plan of their own."""

    def other_than_data(self) -> int:
        return self.tp_size * self.cp_size * self.sp_size * self.pp_size * self.ep_size


def wants_fsdp(args: DistributedArgs) -> bool:
    """Whether these arguments enable FSDP."""
    return bool(args.fsdp) and str(args.fsdp).lower() not in ("false", "none", "")


def read_fsdp(fsdp: Any, config: Any) -> FsdpOptions:
    """The options in `fsdp` (True, or option names) and `fsdp_config`; raises ValueError on invalid ones."""
    given = {str(key).removeprefix("fsdp_"): value for key, value in dict(config or {}).items()}
    if int(given.pop("version", 2)) != 2:
        raise ValueError("version 1 is not supported; remove 'version' to use FSDP2")
    if any(_true(given.get(key, False)) for key in XLA[:2]):
        raise ValueError("'xla' shards with PyTorch/XLA, which is not available here")
    for key in (*XLA, *GONE):
        given.pop(key, None)
    values: dict[str, Any] = {**_words(fsdp)}
    for key, value in given.items():
        values.update(_option(key, value))
    return FsdpOptions(**values)


def _words(fsdp: Any) -> dict[str, Any]:
    words = fsdp.replace(",", " ").split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else []
    values: dict[str, Any] = {}
    for word in map(str, words):
        if word.lower() in ("true", "1"):
            continue
        if word in NOT_ON:
            raise ValueError(f"{word!r} {NOT_ON[word]}")
        if word not in OLD_WORDS:
            raise ValueError(
                f"{word!r} is not a sharding strategy{nearest(word, OLD_WORDS)}; use fsdp=True and fsdp_config"
            )
        values.update(OLD_WORDS[word])
    return values


def _option(key: str, value: Any) -> dict[str, Any]:
    if key in ("cpu_offload", "activation_checkpointing", "cpu_ram_efficient_loading"):
        return {key: _true(value)}
    readers: dict[str, Callable[[], dict[str, Any]]] = {
        "offload_params": lambda: {"cpu_offload": _true(value)},
        "reshard_after_forward": lambda: {key: value if type(value) is int else _true(value)},
        "state_dict_type": lambda: {"whole_checkpoints": _one_of(key, value, STATES) == STATES[0]},
        "auto_wrap_policy": lambda: {"wrap": _one_of(key, value, WRAPS)},
        "transformer_layer_cls_to_wrap": lambda: {"layer_classes": _names(value)},
        "min_num_params": lambda: {key: int(value)},
        **dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), lambda: {key: _one_of(key, value, DTYPES)}),
    }
    if key not in readers:
        known = [*readers, "cpu_offload", "activation_checkpointing", "cpu_ram_efficient_loading", "version"]
        raise ValueError(f"has no key {key!r}{nearest(key, known)} (keys: {', '.join(sorted(known))})")
    return readers[key]()


def _names(value: Any) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value or []
    return tuple(str(name).strip() for name in names if str(name).strip())


def _one_of(key: str, value: Any, choices: tuple[str, ...]) -> str:
    plain = str(value).removeprefix("torch.")
    found = [choice for choice in choices if choice.lower() == plain.lower()]
    if not found:
        raise ValueError(f"{key}={value!r} is not one of {', '.join(choices)}")
    return found[0]


def _true(value: Any) -> bool:
    return value if isinstance(value, bool) else str(value).strip().lower() in ("1", "true", "yes", "on")


def unneeded_keys(config: Any) -> dict[str, str]:
    """Keys of FSDP1 in a configuration, and why they are not needed."""
    keys = [str(key).removeprefix("fsdp_") for key in dict(config or {})]
    return {key: GONE[key] for key in keys if key in GONE}


def read_parallelism(given: Any) -> ParallelSizes:
    """The sizes in a mapping, or in an object with the same attributes; raises ValueError on invalid ones."""
    if given is None:
        return ParallelSizes()
    values = dict(given) if isinstance(given, Mapping) else dict(vars(given))
    known = [each.name for each in fields(ParallelSizes)]
    handlers = ("tp_handler", "cp_handler", "sp_handler", "cp_backend", "sp_backend", "device_mesh")
    unknown = [key for key in values if key not in known and key not in handlers and not key.startswith("_")]
    if unknown:
        raise ValueError(f"has no key {unknown[0]!r}{nearest(unknown[0], known)} (keys: {', '.join(known)})")
    sizes: dict[str, Any] = {}
    for name in known[:-1]:
        size = values.get(name)
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r} is not an integer above 0")
        sizes[name] = size
    return ParallelSizes(**sizes, tp_plan=values.get("tp_plan"))

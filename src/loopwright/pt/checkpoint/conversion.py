"""transformers' conversion table: mapping between a module's tensor names and those `save_pretrained` writes."""

from __future__ import annotations

import copy
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from .tensors import some

SAMPLE_BYTES = 1 << 28
"""Most bytes of tensors converted as a test before the first step; beyond it only names and shapes are compared."""

MOST_NAMES = 2000
"""For models with more names, only the first layers are checked: transformers needs milliseconds per name."""


def is_pretrained(model: Any) -> bool:
    """Whether the model is a transformers model, whose files are read and written through the conversion table."""
    return "transformers" in sys.modules and isinstance(model, sys.modules["transformers"].PreTrainedModel)


def has_table() -> bool:
    """Whether this version of transformers has a conversion table (5.0 and later)."""
    try:
        from transformers import core_model_loading

        return hasattr(core_model_loading, "revert_weight_conversion")
    except ImportError:
        return False


# ---- a model without values ------------------------------------------------------------------------------------------


def skeleton(model: nn.Module) -> Any:
    """The same tree of modules with tensors on the meta device; loading into it does not change the model."""
    tensors: dict[int, Tensor] = {}
    modules: dict[int, nn.Module] = {}

    def empty(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in tensors:
            bare = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
            is_weight = isinstance(tensor, nn.Parameter)
            tensors[id(tensor)] = nn.Parameter(bare, requires_grad=tensor.requires_grad) if is_weight else bare
        return tensors[id(tensor)]

    def twin(module: nn.Module) -> nn.Module:
        if id(module) in modules:
            return modules[id(module)]
        made: nn.Module = object.__new__(_unsharded_class(module))
        made.__dict__.update(module.__dict__)
        modules[id(module)] = made
        made.__dict__["_parameters"] = {name: empty(each) for name, each in module._parameters.items()}
        made.__dict__["_buffers"] = {name: empty(each) for name, each in module._buffers.items()}
        made.__dict__["_state_dict_pre_hooks"] = OrderedDict()  # FSDP's hooks would act on the model itself
        made.__dict__["_modules"] = {
            name: None if each is None else twin(each) for name, each in module._modules.items()
        }
        return made

    return twin(model)


def _unsharded_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before FSDP replaced it: the conversion table is keyed by class names."""
    kind = type(module)
    if kind.__name__.startswith("FSDP") and any(each.__name__ == "FSDPModule" for each in kind.__mro__):
        return next(each for each in kind.__mro__[1:] if each.__name__ == kind.__name__.removeprefix("FSDP"))
    return kind


def is_sharded_class(module: nn.Module) -> bool:
    """Whether FSDP has replaced the class of the module."""
    return _unsharded_class(module) is not type(module)


# ---- export and import -----------------------------------------------------------------------------------------------


def to_exported(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors given under the module's names, in the names and layout of `save_pretrained`."""
    if not has_table():
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(skeleton(model), dict(tensors)))


def from_exported(model: Any, tensors: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """Tensors as `save_pretrained` writes them, under the module's names: converted as `from_pretrained` does."""
    if not has_table():
        return dict(tensors)
    found = _by_table(model, tensors, source=source)
    # transformers adds and removes prefixes by heuristics, and can confuse tensors. If the file has only names under
    # which this model is exported, the mapping is unambiguous and is used instead.
    return {**found, **{name: tensors[written] for name, written in _renamed(model, tensors).items()}}


def _renamed(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Module names mapped to exported names, for tensors exported unchanged; empty if the file has other names."""
    own = skeleton(model).state_dict()
    try:
        exported = to_exported(model, own)
    except Exception:  # a table that cannot be reverted gives no mapping
        return {}
    if not tensors.keys() <= exported.keys():
        return {}
    written = {id(tensor): name for name, tensor in exported.items()}
    return {name: written[id(each)] for name, each in own.items() if written.get(id(each)) in tensors}


def _by_table(model: Any, tensors: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """The result of `from_pretrained` for these tensors."""
    bare = skeleton(model)
    info = _load_into(bare, tensors)
    errors = [f"{name}: {str(text).strip().splitlines()[-1]}" for name, text in info.conversion_errors.items()]
    shapes = [f"{name}: {tuple(saved)} saved, {tuple(own)} in the model" for name, saved, own in info.mismatched_keys]
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [name for name in info.unexpected_keys if not any(re.search(each, name) for each in ignored)]
    parts = [("not converted", errors), ("with a different shape", shapes), ("unexpected", unexpected)]
    listed = "; ".join(f"{what}: {some(sorted(names))}" for what, names in parts if names)
    if listed:
        raise CheckpointError(f"the weights in {source} do not fit the model. {listed}")
    missing = set(info.missing_keys)
    return {name: each.detach() for name, each in bare.state_dict(keep_vars=True).items() if name not in missing}


def _load_into(bare: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Load tensors into a model without values; returns transformers' report on it."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    on_meta = any(tensor.is_meta for tensor in tensors.values())
    options = {"device_map": {"": "meta"}} if on_meta else {}
    try:
        info, _ = convert_and_load_state_dict_in_model(
            model=bare,
            state_dict=dict(tensors),
            load_config=LoadStateDictConfig(weight_mapping=_mapping(bare), **options),
            disk_offload_index=None,
        )
    finally:
        if drawn:
            logging.enable_progress_bar()
    return info


def _mapping(bare: Any) -> list[Any]:
    """The table's rows for a model, after those that the user passed to `from_pretrained`."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = get_model_conversion_mapping(bare)
    seen = {_row(each) for each in known}
    used = getattr(bare, "_weight_conversions", None) or []
    return [*(copy.deepcopy(each) for each in used if _row(each) not in seen), *known]


def _row(transform: Any) -> tuple[str, str | None]:
    return repr(transform), getattr(transform, "scope_prefix", None)


# ---- checks before the first step ------------------------------------------------------------------------------------


def reads_own_names(model: Any) -> bool:
    """Whether `from_pretrained` reads a file with the module's names without renaming or conversion."""
    if not has_table():
        return True
    from transformers.core_model_loading import dot_natural_key

    bare = skeleton(model)
    own = bare.state_dict(keep_vars=True)
    renamings, converters = _split(_mapping(bare))
    names = sorted(own, key=dot_natural_key)  # transformers' order: some rows depend on an earlier name
    return all(_read_as(name, renamings, converters, bare, own) == (name, None) for name in names)


def _split(mapping: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    from transformers.core_model_loading import WeightConverter

    rows = list(mapping)
    converters = [each for each in rows if isinstance(each, WeightConverter)]
    return [each for each in rows if not isinstance(each, WeightConverter)], converters


def _read_as(name: str, renamings: list[Any], converters: list[Any], bare: Any, own: Any) -> tuple[str, Any]:
    from transformers.core_model_loading import rename_source_key

    renamed, converter = rename_source_key(name, renamings, converters, bare.base_model_prefix, own)
    if renamed not in own and name in own:  # transformers then falls back to the original name
        renamed, converter = rename_source_key(name, [], [], bare.base_model_prefix, own)
    return renamed, converter


def export_trouble(model: Any, tensors: Mapping[str, Tensor]) -> str | None:
    """What is lost by writing the model with `save_pretrained` and reading it back; None if nothing is lost."""
    if not has_table():
        return None
    own = skeleton(model).state_dict()
    try:
        bare = {name: own[name] for name in _written(model, tensors) if name in own}
        exported = to_exported(model, bare)
        if len(exported) > MOST_NAMES:
            bare = {name: bare[name] for name in _first_layers(bare)}
            exported = to_exported(model, bare)
        back = _by_table(model, exported, source="an export of this model")
    except CheckpointError as error:
        return str(error)
    except Exception as error:  # a table may fail in any way: the reason is returned
        return f"transformers cannot convert its tensors: {type(error).__name__}: {error}"
    for name, tensor in bare.items():
        if name not in back:
            return f"{name} is missing from it"
        if back[name].shape != tensor.shape:
            return f"{name} has shape {tuple(tensor.shape)} but is read back with shape {tuple(back[name].shape)}"
    converted = _converted(bare, exported)
    renamed = {name: tensor for name, tensor in bare.items() if name not in set(converted)}
    return _confusion(model, renamed) or _values_trouble(model, tensors, converted)


def _confusion(model: Any, renamed: Mapping[str, Tensor]) -> str | None:
    """A tensor exported unchanged but read back as another one, or None; each is one element in its shape."""
    marks = {name: torch.zeros((), dtype=each.dtype).expand(each.shape) for name, each in renamed.items()}
    back = _by_table(model, to_exported(model, marks), source="an export of this model")
    for name, mark in marks.items():
        if name not in back or (mark.numel() and _memory(back[name]) != _memory(mark)):
            return f"{name} is read back as a different tensor"
    return None


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(model: Any, tensors: Mapping[str, Tensor]) -> Iterable[str]:
    """Names that `save_pretrained` writes: without aliases of tied weights and names its class excludes."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    left = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept = {name: tensor.detach() for name, tensor in tensors.items() if name not in left}
    if any(hasattr(each, "device_mesh") for each in kept.values()):  # addresses of DTensors cannot be compared
        return set(kept) - set(getattr(model, "all_tied_weights_keys", None) or ())
    return remove_tied_weights_from_state_dict(kept, model).keys()


def _converted(bare: Mapping[str, Tensor], exported: Mapping[str, Tensor]) -> list[str]:
    """Names whose tensors the table changes, not only renames."""
    kept = {id(tensor) for tensor in exported.values()}
    return [name for name, tensor in bare.items() if id(tensor) not in kept]


def _values_trouble(model: Any, tensors: Mapping[str, Tensor], converted: Iterable[str]) -> str | None:
    """Convert a sample of the changed tensors (first layers) and back; returns a difference, or None."""
    sample = _first_layers(converted)
    chosen = {name: tensors[name].detach() for name in sample}
    size = sum(each.numel() * each.element_size() for each in chosen.values())
    if not chosen or size > SAMPLE_BYTES or any(hasattr(each, "device_mesh") for each in chosen.values()):
        return None
    host = {name: each.to("cpu", copy=True) for name, each in chosen.items()}
    try:
        back = _by_table(model, to_exported(model, host), source="an export of this model")
    except Exception:  # some operations need all tensors; names and shapes were compared
        return None
    for name, tensor in host.items():
        if name not in back or not _equal(back[name], tensor):
            return f"{name} is read back with different values"
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def _first_layers(names: Iterable[str]) -> list[str]:
    """Among names that differ only in their first number, those with the lowest."""
    groups: dict[str, dict[int, list[str]]] = {}
    for name in names:
        found = re.search(r"\.(\d+)\.", name)
        prefix, number = (name[: found.start()], int(found.group(1))) if found else (name, 0)
        groups.setdefault(prefix, {}).setdefault(number, []).append(name)
    return [name for each in groups.values() for name in each[min(each)]]

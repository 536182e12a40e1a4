"""Argument names of transformers 3.x and 4.x: the new name of each, or why it was removed.

Every old name is a real field, so it also works in a user's dataclass and on a command line. It is UNSET if not given,
and set to UNSET again after translation.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .field import UNSET, Group, Spec, arg, default_of, is_redeclared, specs
from .groups.distributed import read_accelerator_config
from .problems import Problems, shown
from .reading import read, read_dict

if TYPE_CHECKING:
    from .base import BaseArguments

logger = logging.getLogger("loopwright")

Translation = Callable[[Any, "BaseArguments"], dict[str, Any]]
"""Maps the old value and the arguments to new names and values."""


@dataclass(frozen=True)
class LegacyRow:
    """How an old name is handled."""

    word: str
    """One sentence for the user."""
    translate: Translation | None = None
    refused: bool = False
    """Not supported; setting it is a problem."""
    harmless: tuple[Any, ...] = (None,)
    """Values without effect (usually the old default)."""
    adds: bool = False
    """The translation adds to the new argument instead of replacing it, so both may be given."""
    shows: Any = UNSET
    """What code that reads the old name gets: its value if that never changes."""

    def asks_nothing(self, given: Any) -> bool:
        """Whether a value is one of the harmless ones; 0 and False differ here."""
        return any(given == value and isinstance(given, bool) == isinstance(value, bool) for value in self.harmless)


def _old(row: LegacyRow) -> Any:
    return arg(UNSET, f"Old name: {row.word}.", row=row, repr=False)


def renamed(new: str, *, harmless: tuple[Any, ...] = (None,), to: Callable[[Any], Any] = lambda value: value) -> Any:
    """An old name that was renamed; its value may be translated."""
    return _old(LegacyRow(f"it became {new}", lambda value, args: {new: to(value)}, harmless=harmless))


def flag(new: str, meaning: Any) -> Any:
    """An old flag that is now one value of a new argument."""
    row = LegacyRow(f"it became {new}={meaning!r}", lambda value, args: {new: meaning}, harmless=(None, False))
    return _old(row)


def added(word: str, translate: Translation, *, harmless: tuple[Any, ...] = (None, False)) -> Any:
    """An old name that became part of a new argument."""
    return _old(LegacyRow(word, translate, harmless=harmless, adds=True))


def gone(why: str) -> Any:
    """An old name that is ignored."""
    return _old(LegacyRow(why))


def refused(why: str, *, harmless: tuple[Any, ...] = (None, False), shows: Any = UNSET) -> Any:
    """An old name whose effect is no longer supported."""
    return _old(LegacyRow(why, refused=True, harmless=harmless, shows=shows))


def _ratio(value: float) -> float:
    """A fraction of all steps, kept below 1 because 1 and above count steps."""
    return math.nextafter(1.0, 0.0) if value == 1 else value


def _with_key(name: str, key: str) -> Translation:
    def translate(value: Any, args: BaseArguments) -> dict[str, Any]:
        return {name: {**(read_dict(getattr(args, name)) or {}), key: value}}

    return translate


def _with_accelerator_key(key: str) -> Translation:
    def translate(value: Any, args: BaseArguments) -> dict[str, Any]:
        config = read_accelerator_config(read_dict(args.accelerator_config))
        return {"accelerator_config": dataclasses.replace(config, **{key: value})}

    return translate


def _with_name(name: str, extra: str) -> Translation:
    def translate(value: Any, args: BaseArguments) -> dict[str, Any]:
        current = getattr(args, name) or []
        names = current.split() if isinstance(current, str) else list(current)
        return {name: [*names, *([] if extra in names else [extra])]}

    return translate


def _start_over(value: Any, args: BaseArguments) -> dict[str, Any]:
    return {"resume_from_checkpoint": False} if args.resume_from_checkpoint is None else {}


def _in_organization(organization: str, args: BaseArguments) -> dict[str, Any]:
    repository = args.hub_model_id or os.path.basename(os.fspath(args.output_dir or "trainer_output"))
    return {"hub_model_id": f"{organization}/{repository.rpartition('/')[2]}"}


@dataclass
class LegacyArgs(Group):
    """The table: one line per old name."""

    title = "Old names"

    # Evaluation
    evaluation_strategy: str | None = renamed("eval_strategy")
    evaluate_during_training: bool | None = flag("eval_strategy", "steps")
    per_gpu_train_batch_size: int | None = renamed("per_device_train_batch_size")
    per_gpu_eval_batch_size: int | None = renamed("per_device_eval_batch_size")
    include_inputs_for_metrics: bool | None = added(
        "it became include_for_metrics=['inputs']", _with_name("include_for_metrics", "inputs")
    )
    use_legacy_prediction_loop: bool | None = gone("there is only one evaluation loop; remove it")
    jit_mode_eval: bool | None = refused("evaluation is no longer traced; torch_compile=True compiles the model")
    past_index: int | None = refused(
        "hidden states are not carried from batch to batch; do it in an override of compute_loss", harmless=(None, -1)
    )

    # Device and precision
    no_cuda: bool | None = flag("use_cpu", True)
    use_mps_device: bool | None = gone("the device is detected automatically; remove it")
    use_ipex: bool | None = gone("Intel's optimizations are part of PyTorch now; remove it")
    fp16_backend: str | None = renamed("half_precision_backend", harmless=(None, "auto"))
    torchdynamo: str | None = renamed("torch_compile_backend")
    tpu_num_cores: int | None = refused("the launcher of a TPU job sets its processes; leave this argument out")
    tpu_metrics_debug: bool | None = added(
        "it became debug='tpu_metrics_debug'", _with_name("debug", "tpu_metrics_debug")
    )

    # Optimizer and data
    adafactor: bool | None = flag("optim", "adafactor")
    warmup_ratio: float | None = renamed("warmup_steps", harmless=(None, 0), to=_ratio)
    packing: str | None = renamed("batch_packing")
    group_by_length: bool | None = flag("train_sampling_strategy", "group_by_length")
    include_tokens_per_second: bool | None = flag("include_num_input_tokens_seen", "all")

    # Saving and the Hub
    overwrite_output_dir: bool | None = added("it became resume_from_checkpoint=False, unless that is set", _start_over)
    save_safetensors: bool | None = refused(
        "weights are always saved as safetensors; for a .bin file call torch.save(model.state_dict(), path)",
        harmless=(None, True),
        shows=True,
    )
    push_to_hub_model_id: str | None = renamed("hub_model_id")
    push_to_hub_organization: str | None = added("it became the first part of hub_model_id", _in_organization)
    push_to_hub_token: str | None = renamed("hub_token")

    # Many processes
    fsdp_min_num_params: int | None = added(
        "it became the key min_num_params of fsdp_config",
        _with_key("fsdp_config", "min_num_params"),
        harmless=(None, 0),
    )
    fsdp_transformer_layer_cls_to_wrap: str | None = added(
        "it became the key transformer_layer_cls_to_wrap of fsdp_config",
        _with_key("fsdp_config", "transformer_layer_cls_to_wrap"),
    )
    dispatch_batches: bool | None = added(
        "it became the key dispatch_batches of accelerator_config",
        _with_accelerator_key("dispatch_batches"),
        harmless=(None,),
    )
    split_batches: bool | None = added(
        "it became the key split_batches of accelerator_config", _with_accelerator_key("split_batches")
    )
    xpu_backend: str | None = renamed("ddp_backend")
    sharded_ddp: str | None = refused("FairScale is discontinued; use fsdp", harmless=(None, False, "", []))
    mp_parameters: str | None = refused("SageMaker's model parallelism is not supported", harmless=(None, ""))
    ray_scope: str | None = refused(
        "a search compares the last values of trials; leave this argument out", harmless=(None, "last")
    )


OLD_VALUES: dict[tuple[str, Any], tuple[Any, str]] = {
    ("optim", "adamw_hf"): ("adamw_torch", "transformers' own AdamW was removed; torch's is the same algorithm"),
    ("half_precision_backend", "amp"): ("torch", "torch's native mixed precision backends were merged"),
    ("ddp_backend", "ccl"): ("xccl", "this is the name of Intel's library in PyTorch"),
    ("debug", True): ("tpu_metrics_debug", "debug takes the names of debugging aids"),
    ("debug", False): ("", "debug takes the names of debugging aids"),
}
"""Values that were renamed, and why."""


def apply_legacy(args: BaseArguments, problems: Problems) -> None:
    """Translate old names and old values to the new ones, each with a warning."""
    for spec in specs(type(args)).values():
        if spec.row is not None and getattr(args, spec.name) is not UNSET:
            _move(args, spec.name, problems)
        if spec.row is not None and spec.row.shows is not UNSET and not is_redeclared(type(args), spec.name):
            setattr(args, spec.name, spec.row.shows)
    for (name, old), (new, why) in OLD_VALUES.items():
        value = getattr(args, name)
        if type(value) is type(old) and value == old:
            setattr(args, name, new)
            _tell(args, f"{shown(name, old)} is an old value: {why}. Use {new!r} instead.", problems)


def _move(args: BaseArguments, name: str, problems: Problems) -> None:
    """Translate one old name; its field is UNSET afterwards, or what it shows."""
    spec, given = specs(type(args))[name], getattr(args, name)
    row: LegacyRow = spec.row
    if is_redeclared(type(args), name):
        _follow_redeclared(args, spec, given, problems)
        return
    setattr(args, name, UNSET)
    if given is row.shows:
        return  # from other arguments, as in dataclasses.replace
    try:
        value = given if row.asks_nothing(given) else read(spec, given)
        if row.refused and not row.asks_nothing(value):
            raise ValueError(row.word)
        news = {} if row.translate is None or row.asks_nothing(value) else row.translate(value, args)
    except ValueError as error:
        problems.add(f"{shown(name, given)}: {error}", name)
        return
    idle = " without effect" if row.asks_nothing(value) else ""
    _tell(args, f"{shown(name, given)} is an old argument{idle}: {row.word}.", problems)
    for new, translated in news.items():
        _set(args, (name, given), (new, translated), problems)


def _follow_redeclared(args: BaseArguments, spec: Spec, given: Any, problems: Problems) -> None:
    """Apply a field that a third party's class declares under an old name; it keeps its value, and any meaning."""
    row: LegacyRow = spec.row
    if row.translate is None or row.refused or row.asks_nothing(given):
        return
    try:
        news = row.translate(read(spec, given), args)
    except ValueError:  # another type: the name means something else there
        return
    for new, translated in news.items():
        _set(args, (spec.name, given), (new, translated), problems)


def _set(args: BaseArguments, old: tuple[str, Any], new: tuple[str, Any], problems: Problems) -> None:
    """Set the new argument, unless it was also given with another value."""
    name, value = new
    fields = type(args).__dataclass_fields__
    current, row = getattr(args, name), specs(type(args))[old[0]].row
    if row.adds or current == value or current == default_of(fields[name]):
        setattr(args, name, value)
    elif old[1] != default_of(fields[old[0]]):  # a default of a user's subclass is overridden by what was passed
        text = f"{shown(*old)} is the old form of {shown(name, value)}, but {shown(name, current)} was given too"
        problems.add(f"{text}; keep only {name}", name)


def _tell(args: BaseArguments, text: str, problems: Problems) -> None:
    if args.strict:
        problems.add(f"{text} (an error because strict=True)")
    elif args.process_index == 0:
        logger.warning(text)

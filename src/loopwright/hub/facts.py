"""What a model card states about a run, read from its trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..args.base import plain, without_secrets
from ..args.derive import derive
from ..args.field import specs
from ..args.problems import Problems
from .card import CardFacts, as_list
from .results import SPEED, Results

if TYPE_CHECKING:
    from ..args.base import BaseArguments
    from ..core.internals import Internals

OF_THE_MACHINE = ("output_dir", "logging_dir", "hub_token", "local_rank", "disable_tqdm", "resume_from_checkpoint")
"""Arguments that say nothing about the model."""
READERS = ("csv", "json", "pandas", "parquet", "text", "arrow", "generator", "imagefolder", "audiofolder")
"""Builders of the package datasets that read files and are not datasets of the Hub."""


@dataclass
class CardOptions:
    """What a user states for the card; see `create_model_card`."""

    language: str | Sequence[str] | None = None
    license: str | None = None
    tags: str | Sequence[str] | None = None
    model_name: str | None = None
    finetuned_from: str | None = None
    tasks: str | Sequence[str] | None = None
    dataset_tags: str | Sequence[str] | None = None
    dataset: str | Sequence[str] | None = None
    dataset_args: str | Sequence[str] | None = None

    def given(self, **others: Any) -> CardOptions:
        """These options, with those of a new call in their place."""
        return CardOptions(**{**vars(self), **{name: value for name, value in others.items() if value is not None}})


def card_facts(internals: Internals, options: CardOptions, *, name: str, inherited_license: str | None) -> CardFacts:
    """Everything that a card of the current state states."""
    trainer, state = internals.trainer, internals.state
    history = list(state.log_history)
    results = Results.last(history)
    base = options.finetuned_from or base_model(trainer.model)
    tags, tasks = dataset_tags(trainer, options), as_list(options.tasks)
    metadata: dict[str, Any] = {
        "library_name": _library(trainer.model),
        "language": as_list(options.language),
        "license": options.license or inherited_license,
        "base_model": base,
        "tags": ["generated_from_trainer", "loopwright", *as_list(options.tags), *_model_tags(trainer.model)],
        "datasets": tags,
        "pipeline_tag": tasks[0] if tasks else None,
        "metrics": [] if results is None else sorted(each for each in results.metrics if each != "loss"),
    }
    if results is not None and tags and tasks:
        metadata["model-index"] = _index(name, results, tags, _names(options, tags), tasks[0])
    return CardFacts(
        name=name,
        results=results,
        evaluations=[_evaluation(row) for row in history if any(each.startswith("eval_") for each in row)],
        metadata=metadata,
        data={
            "training": described_data(getattr(trainer, "train_dataset", None)),
            "evaluation": described_data(trainer.eval_dataset),
            **({"datasets": ", ".join(_names(options, tags))} if _names(options, tags) else {}),
        },
        arguments=changed_arguments(internals.args),
        training=_training(internals, base),
        speed=_speed(trainer),
    )


def _training(internals: Internals, base: str | None) -> dict[str, Any]:
    state, run = internals.state, internals.run
    found: dict[str, Any] = {"model": type(internals.trainer.model).__name__}
    sizes = internals.model_sizes()
    if sizes is not None:
        found["parameters"] = f"{sizes[1]:,}, {sizes[0]:,} of them trained"
    if base:
        found["initial weights from"] = base
    if run.planned_updates is not None:
        found["steps"] = f"{state.global_step:,} of {run.planned_updates:,}"
        found["samples per step"] = f"{run.plan.total_batch_size:,}"
    if state.epoch is not None:
        found["epoch"] = f"{state.epoch:.4g}"
    if run.resumed_from is not None:
        found["resumed from"] = Path(run.resumed_from).name
    place = internals.place()
    if place:
        found["device"] = f"{place}, {internals.strategy.world_size} process(es)"
    return found


def changed_arguments(args: BaseArguments) -> dict[str, Any]:
    """The arguments that the user has set, without secrets and paths of this machine.

    Those are the ones that differ from their defaults and do not follow from the others.
    """
    known, values = specs(type(args)), args.to_dict()
    changed = {
        name: getattr(args, name, value)
        for name, value in values.items()
        if value is not None and not (name in known and plain(known[name].default) == plain(value))
    }
    for name in reversed(list(changed)):
        others = {each: value for each, value in changed.items() if each != name}
        if plain(derived(type(args), others).get(name)) == plain(values[name]):
            changed = others
    return {name: without_secrets(plain(values[name])) for name in changed if name not in OF_THE_MACHINE}


def derived(kind: type[BaseArguments], changed: dict[str, Any]) -> dict[str, Any]:
    """All values of arguments of which only a few are changed."""
    args = object.__new__(kind)
    for name, spec in specs(kind).items():
        object.__setattr__(args, name, changed.get(name, spec.default))
    derive(args, Problems())
    return {name: getattr(args, name) for name in specs(kind)}


def described_data(data: Any) -> str:
    """A dataset in a few words: its name, size and fingerprint, as far as it has them."""
    if data is None:
        return "none"
    if isinstance(data, dict):
        return "; ".join(f"{name}: {described_data(each)}" for name, each in data.items())
    words = [name for name in (getattr(data, "builder_name", None), getattr(data, "config_name", None)) if name]
    words = [str(each) for each in words] or [type(data).__name__]
    if getattr(data, "split", None) is not None:
        words.append(f"split {data.split}")
    try:
        words.append(f"{len(data):,} samples")
    except TypeError:
        words.append("a stream of samples")
    fingerprint = getattr(data, "_fingerprint", None)
    return ", ".join([*words, *([f"fingerprint {fingerprint}"] if isinstance(fingerprint, str) else [])])


def dataset_tags(trainer: Any, options: CardOptions) -> list[str]:
    """The ids of the datasets on the Hub: those that the user states, or that of the evaluation data."""
    stated = as_list(options.dataset_tags) or as_list(options.dataset)
    data = trainer.eval_dataset if trainer.eval_dataset is not None else getattr(trainer, "train_dataset", None)
    builder = getattr(data, "builder_name", None)
    return stated or ([builder] if isinstance(builder, str) and builder not in READERS else [])


def dataset_tasks(trainer: Any, options: CardOptions) -> list[str | None]:
    """The configuration of each dataset, if it is known."""
    stated = as_list(options.dataset_args)
    config = getattr(trainer.eval_dataset, "config_name", None)
    return [*stated] or [config if isinstance(config, str) else None]


def base_model(model: Any) -> str | None:
    """The model on the Hub that the weights come from, if that is known."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return name if isinstance(name, str) and name and not Path(name).exists() else None


def _library(model: Any) -> str | None:
    if hasattr(model, "peft_config"):
        return "peft"
    homes = {kind.__module__.split(".")[0] for kind in type(model).__mro__}
    return next((each for each in ("transformers", "sentence_transformers", "keras") if each in homes), None)


def _model_tags(model: Any) -> list[str]:
    return as_list(getattr(model, "model_tags", None))


def _speed(trainer: Any) -> str:
    report = getattr(trainer, "speed_report", None)
    try:
        return str(report()) if callable(report) else ""
    except Exception:  # a card without speeds is better than a save that fails because of them
        return ""


def _names(options: CardOptions, tags: list[str]) -> list[str]:
    return as_list(options.dataset) or tags


def _index(name: str, results: Results, tags: list[str], titles: list[str], task: str) -> list[dict[str, Any]]:
    metrics = [{"name": each, "type": each, "value": value} for each, value in results.metrics.items()]
    titled = [*titles, *tags[len(titles) :]]
    found = [
        {"task": {"type": task}, "dataset": {"name": title, "type": tag}, "metrics": metrics}
        for tag, title in zip(tags, titled, strict=False)
    ]
    return [{"name": name, "results": found}]


def _evaluation(row: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if name in ("step", "epoch") or name.startswith("eval_")}
    return {name.removeprefix("eval_"): value for name, value in kept.items() if not SPEED.search(name)}

"""`loopwright explain CONFIG`: the plan of a run, and every value that is not a default with its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..command import Result, Usage, Words, run_command

if TYPE_CHECKING:
    from ...pt.trainer import Trainer

USAGE = Usage(
    "explain",
    "CONFIG",
    "Show the plan of a run, and every value that is not a default with its source. Loads model and data, trains "
    "nothing.",
    options={"--all": "show all values, also the defaults", "--values": "show the values only; load nothing"},
    takes_overrides=True,
)


def run(words: list[str]) -> int:
    """Print the explanation; returns the exit code."""
    return run_command(USAGE, words, _explain)


def _explain(words: Words) -> Result:
    from ...config import build_trainer, load_config

    config = load_config(words.first("a configuration file"), words.overrides)
    rows = config.resolved()
    if "--all" not in words.options:
        rows = {key: row for key, row in rows.items() if row["source"] != "default"}
    data: dict[str, Any] = {"config": str(config.path), "values": rows}
    lines = _table(rows)
    if "--values" not in words.options:
        data["plan"] = plan_of(build_trainer(config))
        lines += [
            "",
            "plan:",
            *(f"  {name.replace('_', ' ')}: {_shown(value)}" for name, value in data["plan"].items()),
        ]
    return Result(data, "\n".join(lines))


def _table(rows: dict[str, dict[str, Any]]) -> list[str]:
    keys = max((len(key) for key in rows), default=0)
    values = {key: _shown(row["value"]) for key, row in rows.items()}
    width = min(40, max(map(len, values.values()), default=0))
    return [f"{key:<{keys}}  {values[key]:<{width}}  {row['source']}" for key, row in rows.items()]


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def plan_of(trainer: Trainer) -> dict[str, Any]:
    """The arithmetic of a run, its device and its strategy."""
    internals, args = trainer._loopwright, trainer.args
    plan = internals.data.make_plan(trainer.get_train_dataloader())
    sizes = internals.model_sizes() or (0, 0)
    return {
        "model": type(trainer.model).__name__,
        "parameters": sizes[1],
        "trained_parameters": sizes[0],
        "training_samples": plan.examples,
        "validation_samples": None if trainer.eval_dataset is None else len(trainer.eval_dataset),
        "samples_per_step": plan.total_batch_size,
        "accumulated_batches": plan.accumulation,
        "ranks": plan.world_size,
        "steps": plan.max_steps,
        "steps_per_epoch": plan.updates_per_epoch,
        "device": internals.place(),
        "strategy": _strategy(trainer),
        "speed": f"{args.speed}: accelerations are proved in the first steps; `loopwright check` shows which"
        if args.speed != "off"
        else "off",
        "optimizer": str(args.optim.value if hasattr(args.optim, "value") else args.optim),
    }


def _strategy(trainer: Trainer) -> str:
    name = type(trainer._loopwright.strategy).__name__
    reason = "one process" if trainer.args.world_size == 1 else f"{trainer.args.world_size} processes"
    return f"{name} ({reason})"

"""Callback events come in transformers' order, with transformers' arguments and log keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import loopwright
from loopwright.core.events import EVENTS
from tests.models import TASKS

transformers = pytest.importorskip("transformers")


def recorder(library: Any) -> tuple[Any, list[Any]]:
    """A callback of this library that writes down every event it sees."""
    seen: list[Any] = []

    def listen(event: str) -> Any:
        def method(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            extra = sorted(kwargs.get("logs") or kwargs.get("metrics") or {})
            flags = tuple(
                sorted(name for name in vars(control) if name.startswith("should_") and getattr(control, name))
            )
            seen.append((event, state.global_step, sorted(kwargs), extra, flags))

        return method

    return type("Recorder", (library.TrainerCallback,), {event: listen(event) for event in EVENTS})(), seen


CASES = [
    {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 4},
    {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"},
    {"gradient_accumulation_steps": 3, "logging_steps": 1, "logging_first_step": True, "save_strategy": "no"},
    {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "save_strategy": "no"},
    {
        "max_steps": 7,
        "eval_strategy": "steps",
        "eval_delay": 4,
        "eval_steps": 2,
        "logging_steps": 0.3,
        "save_steps": 100,
    },
    {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "save_total_limit": 1},
    {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", "metric_for_best_model": "loss"},
    {"num_train_epochs": 1.5, "logging_steps": 1, "save_strategy": "no", "include_num_input_tokens_seen": "all"},
]


@pytest.mark.parametrize("options", CASES, ids=lambda case: "-".join(case))
def test_events_arguments_and_log_keys_are_the_same(options: dict[str, Any], tmp_path: Any) -> None:
    runs = []
    for name, library in (("ours", loopwright), ("theirs", transformers)):
        torch.manual_seed(0)
        callback, seen = recorder(library)
        args = library.TrainingArguments(
            output_dir=str(tmp_path / name),
            **{
                "per_device_train_batch_size": 4,
                "num_train_epochs": 2,
                "use_cpu": True,
                "disable_tqdm": True,
                **options,
            },
        )
        data = TASKS["regression"].data(18)
        trainer = library.Trainer(
            TASKS["regression"].model(0.0), args, train_dataset=data, eval_dataset=data[:6], callbacks=[callback]
        )
        trainer.train()
        trainer.evaluate()
        trainer.predict(data[:5])
        runs.append((seen, [sorted(row) for row in trainer.state.log_history]))
    (ours, our_logs), (theirs, their_logs) = runs
    assert [event[:2] for event in ours] == [event[:2] for event in theirs]
    assert ours == theirs
    assert our_logs == their_logs


def test_a_gradient_norm_that_is_not_clipped_is_logged_whenever_a_log_is_made(tmp_path: Any) -> None:
    """A first step and a log requested by a callback, between the regular ones."""
    logs = []
    for name, library in (("ours", loopwright), ("theirs", transformers)):

        class Logs(library.TrainerCallback):  # type: ignore[name-defined, misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                control.should_log |= state.global_step == 3

        for callbacks in ([], [Logs()]):
            args = library.TrainingArguments(
                str(tmp_path / name), max_steps=4, max_grad_norm=0, logging_first_step=True, logging_steps=100,
                save_strategy="no", use_cpu=True, disable_tqdm=True, per_device_train_batch_size=4,
            )  # fmt: skip
            torch.manual_seed(0)
            model, data = TASKS["regression"].model(0.0), TASKS["regression"].data(18)
            trainer = library.Trainer(model, args, train_dataset=data, callbacks=callbacks)
            trainer.train()
            logs.append([(row["step"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row])
    ours, theirs = [*logs[0], *logs[1]], [*logs[2], *logs[3]]
    assert [step for step, _ in ours] == [step for step, _ in theirs] == [1, 1, 3]
    assert [norm for _, norm in ours] == pytest.approx([norm for _, norm in theirs], rel=1e-5)

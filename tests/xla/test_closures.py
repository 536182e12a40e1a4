"""Logs on lazy XLA are step closures: the host does not wait for numbers, and no log is too late."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import loopwright
from tests.xla.runs import saved, trainer

TIMES = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
TIMES_OF_EVAL = (
    "eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time",
)  # fmt: skip


class Listener(loopwright.TrainerCallback):
    """A user's callback, which must see each log at its step."""

    def __init__(self, stop_at: int = 0) -> None:
        self.seen: list[tuple[int, float]] = []
        self.stop_at = stop_at

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.seen.append((state.global_step, logs["loss"]))
            control.should_training_stop |= state.global_step == self.stop_at


class Fails(loopwright.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("the third step")


def history(run: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in log.items() if k not in (*TIMES, *TIMES_OF_EVAL)} for log in run.state.log_history]


def order_of(run: Any) -> list[str]:
    """What the host did, in order: `step` when it handed one to the device, `read` when it asked for a number."""
    did: list[str] = []
    end, read = run._loopwright.strategy.zero_grad, run._loopwright.strategy.read

    def ended() -> None:
        did.append("step")
        end()

    def asked(scalars: list[Any]) -> list[float]:
        did.append("read")
        return read(scalars)

    run._loopwright.strategy.zero_grad, run._loopwright.strategy.read = ended, asked
    run.train()
    return did


def test_a_closure_runs_at_the_end_of_its_step(tmp_path: Any) -> None:
    run, seen = trainer("own", tmp_path), []
    value = torch.ones(2, device=run._loopwright.device) * 3
    run._loopwright.strategy.defer(lambda: seen.append(float(value.sum())))
    assert not seen
    run._loopwright.strategy.boundary()
    assert seen == [6.0]


def test_a_number_is_read_when_the_device_has_the_next_step(tmp_path: Any) -> None:
    late = "".join(order_of(trainer("own", tmp_path, max_steps=4)))
    assert late.endswith("step" + "stepread" * 3 + "read"), late
    at_once = "".join(order_of(trainer("own", tmp_path, max_steps=4, callbacks=[Listener()])))
    assert at_once.endswith("stepread" * 4), at_once
    assert late.count("step") == at_once.count("step") and late.count("read") == at_once.count("read") == 4


@pytest.mark.parametrize("options", [{}, {"logging_steps": 2}, {"gradient_accumulation_steps": 2}, {"eval_steps": 2}])
def test_logs_are_what_they_are_when_somebody_waits_for_them(options: dict[str, Any], tmp_path: Any) -> None:
    often = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, **options}
    late = trainer("dropped", tmp_path / "late", **often)
    late.train()
    listener = Listener()
    at_once = trainer("dropped", tmp_path / "once", callbacks=[listener], **often)
    at_once.train()
    assert history(late) == history(at_once) and len(listener.seen) >= 2
    assert [log["step"] for log in history(late)] == sorted(log["step"] for log in history(late))


def test_a_checkpoint_holds_the_log_of_its_step(tmp_path: Any) -> None:
    run = trainer("own", tmp_path, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
    run.train()
    for step in (2, 4, 6):
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        kinds = [(log["step"], "eval_loss" in log) for log in state["log_history"]]
        assert kinds[-2:] == [(step, False), (step, True)], "the loss, then the evaluation"
    again = trainer("own", tmp_path / "again")
    again.train(resume_from_checkpoint=saved(tmp_path, 2))
    assert history(again)[-1]["train_loss"] == history(run)[-1]["train_loss"]


def test_a_callback_that_stops_by_the_loss_stops_at_its_step(tmp_path: Any) -> None:
    listener = Listener(stop_at=2)
    run = trainer("own", tmp_path, callbacks=[listener])
    run.train()
    assert run.state.global_step == 2 and [step for step, _ in listener.seen] == [1, 2]


def test_an_error_comes_after_the_logs_before_it(tmp_path: Any) -> None:
    run = trainer("own", tmp_path, callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="the third step"):
        run.train()
    assert [log["step"] for log in run.state.log_history] == [1, 2]
    other = trainer("own", tmp_path / "other", max_steps=2)
    other.train()
    assert [log["step"] for log in run.state.log_history] == [1, 2], "nothing of it is left for the next run"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]

"""Updates that are not finite, and losses that jump: what the policies do about them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from loopwright.core.order import permutation
from loopwright.errors import NonFiniteError

from .numpy_runs import Counted, Recorder, outcome, rows, samples, steps_in, trainer_of
from .numpy_trainer import NumpyTrainer, Sample

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

SIZES = [6, 6, 6, 2]
"""Samples of the four updates of an epoch."""


def with_one_bad(bad: int, value: float = math.nan) -> list[Sample]:
    return [(x, np.array([value])) if i == bad else (x, y) for i, (x, y) in enumerate(samples())]


def bad_steps(bad: int) -> list[int]:
    """The updates in which a sample comes, one in each of three epochs."""
    found = []
    for epoch in range(3):
        place = permutation(20, 42 + epoch).tolist().index(bad)
        found.append(epoch * 4 + place // 6 + 1)
    return found


@settings(max_examples=12)
@given(st.integers(0, 19), st.sampled_from([math.nan, math.inf]), st.integers(1, 5))
def test_skipped_updates_change_nothing_and_are_counted(bad: int, value: float, log: int) -> None:
    with TemporaryDirectory() as folder:
        trainer = trainer_of(folder, data=with_one_bad(bad, value), on_nonfinite="skip", logging_steps=log)
        result = trainer.train()
        logged = [row for row in rows(folder) if "loss" in row]
    assert result.global_step == 12, "a skipped update is an update of the plan"
    assert all(np.isfinite(each).all() for each in trainer.model.parameters.values())
    assert all(np.isfinite(each).all() for each in trainer.optimizer.velocity.values())
    told = sum(row.get("nonfinite_steps", 0) for row in logged)
    assert told == len([step for step in bad_steps(bad) if step <= 12 // log * log])
    assert trainer._loopwright.run.meter.nonfinite == 3


def test_a_skipped_update_leaves_weights_and_momentum_alone(output_dir: str) -> None:
    class Watching(NumpyTrainer):
        def _get_learning_rate(self) -> float:
            seen.append((self.model.parameters["weight"].tolist(), self.optimizer.velocity["weight"].tolist()))
            return super()._get_learning_rate()

    seen: list[Any] = []
    trainer_of(output_dir, cls=Watching, data=with_one_bad(3), on_nonfinite="skip").train()
    same = [step for step in range(2, 13) if seen[step - 1] == seen[step - 2]]
    assert same == [step for step in bad_steps(3) if step > 1]


@pytest.mark.parametrize("bad", [0, 7, 19])
def test_going_on_all_the_same_is_told(bad: int, output_dir: str) -> None:
    trainer = trainer_of(output_dir, data=with_one_bad(bad), on_nonfinite="continue", logging_steps=1)
    trainer.train()
    assert np.isnan(trainer.model.parameters["weight"]).all()
    first = bad_steps(bad)[0]
    told = [row["step"] for row in rows(output_dir) if row.get("nonfinite_steps")]
    assert told == list(range(first, 13)), "what is not finite once stays so"


@settings(max_examples=12)
@given(st.integers(0, 19), st.integers(1, 5), st.sampled_from(["no", "steps"]))
def test_raising_stops_before_the_bad_update(bad: int, log: int, save: str) -> None:
    first = bad_steps(bad)[0]
    with TemporaryDirectory() as folder:
        options = {"on_nonfinite": "raise", "logging_steps": log, "save_strategy": save, "save_steps": 1}
        trainer = trainer_of(folder, data=with_one_bad(bad), **options)
        with pytest.raises(NonFiniteError, match=f"at step {first}; the weights are those after step {first - 1}"):
            trainer.train()
        place = json.loads((Path(folder) / f"incident-step-{first}" / "incident.json").read_text())
        taken = permutation(20, 42 + place["epoch"]).tolist()[place["first"] : place["first"] + place["samples"]]
        assert bad in taken and len(taken) == SIZES[(first - 1) % 4]
        assert steps_in(folder) == (list(range(1, first)) if save == "steps" else [])
    assert all(np.isfinite(each).all() for each in trainer.model.parameters.values())


# ---- spikes ----------------------------------------------------------------------------------------------------------


class Spiking(NumpyTrainer):
    """Its loss jumps in some updates: those that are the n-th of all that were computed."""

    jumps: tuple[int, ...] = ()
    begun = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: int) -> float:
        self.begun += 1
        if self.begun in self.jumps:
            inputs = {**inputs, "targets": inputs["targets"] + 1e3}
        return super().training_step(model, inputs, num_items_in_batch)


def spiking(folder: str, *jumps: int, **options: Any) -> NumpyTrainer:
    cls = type("Mine", (Spiking,), {"jumps": jumps})
    given = {
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 5,
        "num_train_epochs": 5,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "on_spike": "rollback",
        "dropout": 0.0,
        **options,
    }
    return trainer_of(folder, cls=cls, **given)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("jump", [6, 7, 12, 13])
def test_a_run_whose_loss_jumps_goes_back_and_on(jump: int, later: bool, output_dir: str) -> None:
    data, recorder = Counted(samples()), Recorder()
    trainer = spiking(output_dir, jump, data=data, async_save=later)
    trainer.callback_handler.add_callback(recorder)
    result = trainer.train()
    good = (jump - 1) // 2 * 2
    undone = jump - good
    assert data.taken == [i for epoch in range(5) for i in permutation(20, 42 + epoch).tolist()], "the data goes on"
    assert result.global_step == trainer.state.max_steps == steps_in(output_dir)[-1] == 20 - undone
    steps = [row["step"] for row in rows(output_dir) if "loss" in row]
    assert steps == list(range(1, 21 - undone)), "every step has one row"
    assert max(row["loss"] for row in rows(output_dir) if "loss" in row) < 100
    assert np.isfinite(trainer.model.parameters["weight"]).all()


def test_without_an_earlier_checkpoint_there_is_nothing_to_go_back_to(output_dir: str) -> None:
    trainer = spiking(output_dir, 6, save_strategy="no")
    assert trainer.train().global_step == 20


def test_after_going_back_weights_are_those_of_the_checkpoint(output_dir: str) -> None:
    """Updates after a rollback are those that a shorter run would make with the batches after the jump."""
    options = {"lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    trainer = spiking(output_dir, 7, **options, max_steps=8)
    trainer.train()
    again = spiking(f"{output_dir}/again", **options, max_steps=6)
    again.train()
    for chosen in (permutation(20, 43).tolist()[15:], permutation(20, 44).tolist()[:5]):
        batch = [samples()[i] for i in chosen]
        loss = again.model.loss(np.stack([x for x, _ in batch]), np.stack([y for _, y in batch]), 5)
        again.optimizer.step(loss.gradients)
    assert outcome(trainer)["weights"] == outcome(again)["weights"]


@pytest.mark.parametrize("max_steps", [8, 9, 12, 13])
def test_a_run_of_so_many_updates_has_them_whatever_is_undone(max_steps: int, output_dir: str) -> None:
    data = Counted(samples())
    trainer = spiking(output_dir, 7, data=data, max_steps=max_steps)
    assert trainer.train().global_step == trainer.state.max_steps == steps_in(output_dir)[-1] == max_steps
    order = [i for epoch in range(4) for i in permutation(20, 42 + epoch).tolist()]
    assert data.taken == order[: (max_steps + 1) * 5]


@pytest.mark.parametrize("options", [{}, {"max_steps": 16}], ids=str)
def test_a_rollback_survives_a_restart(options: dict[str, Any], output_dir: str) -> None:
    whole = spiking(f"{output_dir}-whole", 7, **options)
    whole.train()

    class PowerCut(Exception):
        pass

    broken = spiking(output_dir, 7, **options)

    def cut(*given: Any, **context: Any) -> None:
        if broken.state.global_step == 10:
            raise PowerCut

    recorder = Recorder()
    recorder.on_step_begin = cut  # type: ignore[attr-defined]
    broken.callback_handler.add_callback(recorder)
    with pytest.raises(PowerCut):
        broken.train()
    again = spiking(output_dir, **options)
    again.train(True)
    ours, theirs = outcome(again), outcome(whole)
    assert ours["weights"] == theirs["weights"] and ours["rows"] == theirs["rows"] and ours["state"] == theirs["state"]

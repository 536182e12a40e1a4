"""train_sampling_strategy="batch_rebalance": the updates of a random order, in micro-batches of similar cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import loopwright
from loopwright.core.sampling.balancing import padded_cost
from tests.models import Tokens, assert_close, made, pad, samples, trained_gradients, trainer_of, weights

LENGTHS = (11, 101, 5, 17, 3, 29, 8, 2, 60, 9, 4, 13, 7, 6, 10, 12, 1, 15, 21)
OPTIONS: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "speed": "off"}
BALANCED = {**OPTIONS, "train_sampling_strategy": "batch_rebalance"}


def batches_of(trainer: Any, epoch: int = 0, start: int = 0) -> list[Any]:
    loader = trainer.get_train_dataloader()
    loader.batch_sampler.go_to(epoch, start)
    return list(loader)


def cost(batch: Any) -> float:
    return padded_cost(*batch["input_ids"].shape)


@pytest.mark.parametrize("drop_last", [False, True])
def test_updates_have_the_gradients_of_the_random_order(tmp_path: Any, drop_last: bool) -> None:
    model, data = made(Tokens), samples(LENGTHS)
    found = []
    for name in ("random", "batch_rebalance"):
        options = {**OPTIONS, "train_sampling_strategy": name, "dataloader_drop_last": drop_last}
        found.append(trained_gradients(model, data, tmp_path / name, **options))
    assert len(found[0]) == len(found[1]) == (3 if drop_last else 4)
    for balanced, random in zip(found[1], found[0], strict=True):
        assert_close(balanced, random)


def test_micro_batches_cost_less_and_about_the_same(tmp_path: Any) -> None:
    data = samples(LENGTHS[:18])
    random = list(trainer_of(made(Tokens), data, tmp_path, **{**OPTIONS, "train_sampling_strategy": "random"})
                  .get_train_dataloader())  # fmt: skip
    balanced = batches_of(trainer_of(made(Tokens), data, tmp_path, **BALANCED))
    for first in (0, 3, 6):
        assert max(map(cost, balanced[first : first + 3])) <= max(map(cost, random[first : first + 3]))
    assert sum(map(cost, balanced)) < sum(map(cost, random))


def test_no_costlier_than_that_of_transformers(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers.trainer_pt_utils")
    lengths = torch.randint(1, 400, (240,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = transformers.BatchRebalanceSampler(lengths, effective_batch_size=24, dp_size=1, grad_accum=4, seed=42)
    data = [{"input_ids": torch.ones(length, dtype=torch.long)} for length in lengths]
    options = {**BALANCED, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 4}
    own = trainer_of(made(Tokens), data, tmp_path, **options).get_train_dataloader().batch_sampler
    pairs = list(zip(own, sampler, strict=True))
    for first in range(0, len(pairs), 4):
        update = pairs[first : first + 4]
        assert sorted(i for mine, _ in update for i in mine) == sorted(i for _, its in update for i in its)
        worst = [
            max(padded_cost(len(each), max(lengths[i] for i in each)) for each in side)
            for side in zip(*update, strict=True)
        ]
        assert worst[0] <= worst[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumed_inside_an_epoch_is_the_run_that_was(tmp_path: Any, workers: int) -> None:
    options = {**BALANCED, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch",
               "dataloader_num_workers": workers}  # fmt: skip
    whole = trainer_of(made(Tokens), samples(LENGTHS), tmp_path / "a", **options)
    whole.train()
    again = trainer_of(made(Tokens), samples(LENGTHS), tmp_path / "a", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert all(torch.equal(weights(whole.model)[name], value) for name, value in weights(again.model).items())
    losses = [[row["loss"] for row in each.state.log_history if "loss" in row] for each in (whole, again)]
    assert losses[0] == losses[1] and len(losses[0]) == 8


def test_an_order_from_any_position_is_a_function_of_it(tmp_path: Any) -> None:
    trainer = trainer_of(made(Tokens), samples(LENGTHS), tmp_path, **BALANCED)
    whole, rest = batches_of(trainer, 1), batches_of(trainer, 1, start=6)
    assert len(whole) == 10 and len(rest) == 7
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(whole[3:], rest, strict=True))


def test_lengths_may_be_a_column(tmp_path: Any) -> None:
    data = [{**each, "n": 1 + index % 2 * 1000} for index, each in enumerate(samples([5] * 8))]
    options = {**BALANCED, "gradient_accumulation_steps": 4, "length_column_name": "n"}
    trainer = trainer_of(made(Tokens), data, tmp_path, **options)
    batches = list(trainer.get_train_dataloader().batch_sampler)
    longest = [max(data[i]["n"] for i in each) for each in batches]
    assert sorted(map(len, batches))[-1] > 2 and sorted(longest) != [1001] * 4


def test_changing_the_accumulation_is_refused(tmp_path: Any) -> None:
    class Change(loopwright.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            args.gradient_accumulation_steps = 2

    trainer = trainer_of(made(Tokens), samples(LENGTHS), tmp_path, callbacks=[Change()], **BALANCED)
    with pytest.raises(loopwright.ArgumentsError, match="was changed after step 1.*batch_rebalance"):
        trainer.train()


def test_a_stream_is_refused(tmp_path: Any) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(samples())

    trainer = trainer_of(made(Tokens), Stream(), tmp_path, max_steps=1, collator=pad, **BALANCED)
    with pytest.raises(loopwright.ArgumentsError, match="'batch_rebalance' needs a map-style dataset"):
        trainer.train()

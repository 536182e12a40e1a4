"""train_dataset={name: dataset}: shares, exact resume, and the loss of each dataset in the log."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import loopwright
from loopwright import ArgumentsError, DataError, ModelError, TrainingArguments
from tests.models import ShiftedTokens, Tokens, made, pad, samples, summed, trainer_of, weights

LENGTHS = {"web": (11, 31, 5, 17, 3, 29), "code": (8, 2, 60, 9), "talk": (4, 13)}
OPTIONS: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2,
                           "train_sampling_strategy": "random", "learning_rate": 0.05}  # fmt: skip


def sources() -> dict[str, Any]:
    return {name: samples(lengths) for name, lengths in LENGTHS.items()}


def rows(trainer: Any, resume: Any = None) -> list[dict[str, Any]]:
    trainer.train(resume_from_checkpoint=resume)
    return [row for row in trainer.state.log_history if "loss" in row]


class Seen(torch.utils.data.Dataset):
    """Counts how often its samples are loaded."""

    def __init__(self, lengths: Any) -> None:
        self.samples, self.count = samples(lengths), 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return self.samples[index]


def test_each_source_has_its_share(tmp_path: Any) -> None:
    for given, expected in (({"web": 1, "code": 1, "talk": 2}, [3, 3, 6]), (None, [6, 4, 2])):
        data = {name: Seen(lengths) for name, lengths in LENGTHS.items()}
        trainer = trainer_of(made(Tokens), data, tmp_path, **{**OPTIONS, "train_dataset_weights": given})
        assert len(trainer.get_train_dataloader()) == 6
        assert sum(1 for _ in trainer.get_train_dataloader()) == 6
        assert [each.count for each in data.values()] == expected


@pytest.mark.parametrize("cls", [Tokens, ShiftedTokens])
def test_the_loss_of_each_source_is_that_by_hand(tmp_path: Any, cls: type) -> None:
    model, data = made(cls), sources()
    options = {**OPTIONS, "learning_rate": 0.0, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 4,
               "num_train_epochs": 1}  # fmt: skip
    row = rows(trainer_of(model, data, tmp_path / "a", **options))[0]
    for name, each in data.items():
        pairs = [summed(model.logits(x["input_ids"][None]), x["labels"][None], shift=cls.shift) for x in each]
        expected = sum(float(total.detach()) for total, _ in pairs) / sum(int(count) for _, count in pairs)
        assert row[f"loss_{name}"] == pytest.approx(expected, rel=1e-6)
    without = rows(trainer_of(model, data, tmp_path / "b", **options, logging_source_losses=False))[0]
    assert not [name for name in without if name.startswith("loss_")]
    assert row["loss"] == pytest.approx(without["loss"], rel=1e-6)


def test_dividing_by_source_does_not_change_training(tmp_path: Any) -> None:
    found = []
    for logged in (True, False):
        options = {**OPTIONS, "optim": "adamw_torch", "logging_source_losses": logged, "speed": "off"}
        trainer = trainer_of(made(Tokens), sources(), tmp_path / str(logged), **options)
        trainer.train()
        found.append(weights(trainer.model))
    assert all(float((found[0][name] - value).abs().max()) < 1e-10 for name, value in found[1].items())


@pytest.mark.parametrize("given", [{"web": 1, "code": 1, "talk": 2}, {"web": 1, "code": [[0, 0], [5, 3]], "talk": 0.5}])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumed_inside_an_epoch_is_the_run_that_was(tmp_path: Any, given: Any, workers: int) -> None:
    options = {**OPTIONS, "train_dataset_weights": given, "optim": "adamw_torch", "save_strategy": "steps",
               "save_steps": 2, "logging_steps": 3, "dataloader_num_workers": workers}  # fmt: skip
    whole = trainer_of(made(Tokens), sources(), tmp_path, **options)
    logged = rows(whole)
    again = trainer_of(made(Tokens), sources(), tmp_path, **options)
    assert [{**row, "epoch": 0} for row in rows(again, str(tmp_path / "checkpoint-2"))] == [
        {**row, "epoch": 0} for row in logged
    ]
    assert all(torch.equal(weights(whole.model)[name], value) for name, value in weights(again.model).items())


def test_a_loss_that_compares_samples_is_not_divided(tmp_path: Any, caplog: Any) -> None:
    class Contrast(loopwright.Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            hidden = model.embed(inputs["input_ids"]).mean(1)
            return torch.nn.functional.cross_entropy(hidden @ hidden.T, torch.arange(len(hidden)))

    options = {**OPTIONS, "per_device_train_batch_size": 12, "gradient_accumulation_steps": 1, "max_steps": 1}
    row = rows(trainer_of(made(Tokens), sources(), tmp_path, cls=Contrast, **options))[0]
    assert not [name for name in row if name.startswith("loss_")]
    assert "the loss of each training dataset is not logged: the loss depends on how a batch is split" in caplog.text


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(samples())


@pytest.mark.parametrize(
    ("data", "given", "words"),
    [
        ({"a": samples(), "b": samples()}, {"a": 1}, "'b' is in one of them only"),
        ({"alpha": samples()}, {"alpha": 1, "alpa": 2}, "'alpa' is in one of them only.*did you mean 'alpha'"),
        (samples(), {"a": 1}, "train_dataset_weights needs several training datasets, train_dataset={name: dataset}"),
        ({"a": Stream()}, None, r"train_dataset\['a'\] is a stream"),
        ({"a": []}, None, r"training \(a\) dataset is empty"),
        ({}, None, "name each dataset"),
    ],
    ids=["missing", "misspelt", "alone", "stream", "empty", "none"],
)
def test_what_does_not_fit_is_named(tmp_path: Any, data: Any, given: Any, words: str) -> None:
    with pytest.raises((ArgumentsError, DataError), match=words):
        trainer_of(made(Tokens), data, tmp_path, train_dataset_weights=given, max_steps=1, collator=pad).train()


def test_the_splits_of_a_dataset_are_not_mixed(tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]})
    with pytest.raises(DataError, match="is a DatasetDict with the splits train, test; pass one of them"):
        trainer_of(made(Tokens), datasets.DatasetDict(train=one, test=one), tmp_path, max_steps=1).train()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1], "must be a dict such as|not JSON|is not a dict"),
        ({"a": -1}, "a=-1 must be a number"),
        ({"a": [[5, 1], [2, 1]]}, "the steps .* must increase"),
        ({"a": [[1]]}, "must be .step, weight."),
        ({"a": 0}, "all weights are 0 at step 0"),
        ({"a": [[0, 0], [5, 1]], "b": [[2, 0], [3, 1]]}, "all weights are 0 at step 0"),
    ],
    ids=str,
)
def test_wrong_weights_are_named(given: Any, words: str) -> None:
    with pytest.raises(ArgumentsError, match=rf"train_dataset_weights.*({words})"):
        TrainingArguments("run", train_dataset_weights=given, use_cpu=True)


def test_a_named_value_is_not_mixed_with_the_loss_of_a_dataset(tmp_path: Any) -> None:
    class Named(loopwright.Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            return model(**inputs)["loss"], {"loss_web": 7.0}

    trainer = trainer_of(made(Tokens), sources(), tmp_path, cls=Named, **OPTIONS)
    with pytest.raises(ModelError, match="'loss_web', which is the loss of a dataset of train_dataset; use another"):
        trainer.train()


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("accumulated", [1, 2, 3])
def test_a_schedule_changes_at_its_step(tmp_path: Any, accumulated: int, drops: bool) -> None:
    class Steps(loopwright.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            found.setdefault(self.state.global_step, set()).update(inputs["input_ids"][:, 0].tolist())
            return super().training_step(model, inputs, num_items_in_batch)

    found: dict[int, set[int]] = {}
    data = {
        name: [{"input_ids": torch.full((4,), value), "labels": torch.ones(4, dtype=torch.long)}] * size
        for name, value, size in (("first", 1, 7), ("second", 2, 6))
    }
    given = {"first": [[9, 1.0], [10, 0.0]], "second": [[9, 0.0], [10, 1.0]]}
    trainer = trainer_of(made(Tokens), data, tmp_path, cls=Steps, max_steps=14, train_dataset_weights=given,
                         dataloader_drop_last=drops, per_device_train_batch_size=2, speed="off",
                         gradient_accumulation_steps=accumulated)  # fmt: skip
    trainer.train()
    assert found == {step: {1 if step < 10 else 2} for step in range(14)}


def test_a_schedule_of_packed_batches_is_refused(tmp_path: Any) -> None:
    given = {"web": [[4, 1.0], [5, 0.0]], "code": 1, "talk": 1}
    trainer = trainer_of(made(Tokens), sources(), tmp_path, train_dataset_weights=given, max_steps=2,
                         batch_packing="across_updates", per_device_train_batch_tokens=64)  # fmt: skip
    with pytest.raises(ArgumentsError, match="web has a schedule, but batch_packing"):
        trainer.train()

"""Datasets of every kind, the order of samples, random draws in workers, and the columns a model gets."""

from __future__ import annotations

import gc
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

import loopwright
from loopwright import ArgumentsError, DataError, Trainer, TrainingArguments
from loopwright.pt.data.loaders import build_loader
from tests.models import Regression, regression_data

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")


class Recorder(nn.Module):
    """A model that writes down which samples it saw and what the dataset drew for them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.batches: list[list[int]] = []
        self.draws: list[list[float]] = []

    def forward(self, ids: torch.Tensor, draws: torch.Tensor | None = None, labels: torch.Tensor | None = None) -> Any:
        self.batches.append(ids.tolist())
        if draws is not None:
            self.draws += draws.tolist()
        return {"loss": (self.w * ids.float().mean()).sum() + 1.0}

    @property
    def seen(self) -> list[int]:
        return [i for batch in self.batches for i in batch]


class Mapped(Dataset):
    def __init__(self, n: int = 11) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return {"ids": index}


class Augmented(Mapped):
    """Draws from all three streams of random numbers."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        return {**super().__getitem__(index), "draws": draws}


class Stream(IterableDataset):
    def __init__(self, n: int = 11) -> None:
        self.n = n
        self.epochs: list[int] = []

    def __iter__(self) -> Any:
        return iter([{"ids": i} for i in range(self.n)])

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


def train(data: Any, library: Any = loopwright, **options: Any) -> Any:
    options = {"per_device_train_batch_size": 4, "num_train_epochs": 3, "save_strategy": "no", "use_cpu": True,
               "disable_tqdm": True, "logging_strategy": "no", **options}  # fmt: skip
    resume = options.pop("resume", None)
    args = library.TrainingArguments(**{"output_dir": "run", **options})
    trainer = library.Trainer(Recorder(), args, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def seen(data: Any, library: Any = loopwright, **options: Any) -> list[list[int]]:
    return train(data, library, **options).model.batches


# ---- the order is transformers' -------------------------------------------------------------------------------------

MAP_STYLE = {
    "a dataset": Mapped,
    "a list": lambda: [{"ids": i} for i in range(11)],
    "datasets": lambda: datasets.Dataset.from_dict({"ids": list(range(11))}),
}


@pytest.mark.parametrize("options", [{}, {"seed": 7}, {"data_seed": 3}, {"seed": 7, "data_seed": 3}], ids=str)
@pytest.mark.parametrize("kind", MAP_STYLE)
def test_the_order_of_three_epochs_is_that_of_transformers(kind: str, options: dict[str, int]) -> None:
    ours = seen(MAP_STYLE[kind](), **options)
    assert ours == seen(MAP_STYLE[kind](), transformers, **options)
    assert [len(batch) for batch in ours] == [4, 4, 3] * 3
    epochs = [sorted(i for batch in ours[k : k + 3] for i in batch) for k in (0, 3, 6)]
    assert epochs == [list(range(11))] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"dataloader_drop_last": True},
        {"num_train_epochs": 1.5},
        {"num_train_epochs": 0.5},
        {"max_steps": 5},
        {"train_sampling_strategy": "sequential"},
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 2, "num_train_epochs": 1.5},
        {"dataloader_num_workers": 2},
    ],
    ids=str,
)
def test_the_batches_are_those_of_transformers(options: dict[str, Any]) -> None:
    ours, theirs = train(Mapped(), **options), train(Mapped(), transformers, **options)
    first = 1 if "gradient_accumulation_steps" in options else 0  # the first update finds out how the loss is scaled
    assert [b for b in ours.model.batches if b][-3:] == theirs.model.batches[-3:]
    assert first or ours.model.batches == theirs.model.batches
    assert ours.state.global_step == theirs.state.global_step
    assert ours.state.epoch == theirs.state.epoch


def test_drop_last_leaves_out_the_short_batch() -> None:
    trainer = train(Mapped(), dataloader_drop_last=True)
    assert [len(batch) for batch in trainer.model.batches] == [4, 4] * 3
    assert trainer.state.global_step == 6


def test_the_seed_decides_the_order_and_data_seed_wins() -> None:
    assert seen(Mapped(), seed=1) != seen(Mapped(), seed=2)
    assert seen(Mapped(), seed=1, data_seed=5) == seen(Mapped(), seed=2, data_seed=5)


def test_creating_and_training_draws_what_transformers_draws() -> None:
    after = []
    for library in (loopwright, transformers):
        train(Mapped(), library)
        after.append((torch.rand(3).tolist(), random.random(), np.random.rand()))
    assert after[0] == after[1]


# ---- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_with_a_length_is_one_epoch_per_pass() -> None:
    trainer = train(SizedStream(8), num_train_epochs=2)
    assert trainer.model.seen == list(range(8)) * 2
    assert trainer.state.epoch == 2.0
    assert trainer.train_dataset.epochs == [0, 1]


def test_a_stream_without_a_length_goes_on_until_max_steps() -> None:
    trainer = train(Stream(11), max_steps=7)
    assert trainer.state.global_step == 7
    assert trainer.model.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]] * 2 + [[0, 1, 2, 3]]
    assert trainer.train_dataset.epochs == [0, 1, 2]


def test_a_stream_without_a_length_is_seen_as_transformers_sees_it() -> None:
    ours, theirs = train(Stream(11), max_steps=7), train(Stream(11), transformers, max_steps=7)
    assert ours.model.batches == theirs.model.batches


def test_a_stream_loaded_by_workers_gives_every_worker_its_copy() -> None:
    trainer = train(Stream(4), max_steps=4, dataloader_num_workers=2, per_device_train_batch_size=2)
    assert sorted(trainer.model.seen) == sorted(list(range(4)) * 2)


class KnowsItsPass(Stream):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([{"ids": 100 * self.epoch + i} for i in range(4)])


@pytest.mark.parametrize(
    "options",
    [{}, {"dataloader_num_workers": 1}, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}],
    ids=str,
)
def test_a_stream_that_knows_its_pass_is_told_it(options: dict[str, Any]) -> None:
    batches = seen(KnowsItsPass(), max_steps=3, **options)
    assert batches == [[100 * e + i for i in range(4)] for e in range(3)]


def test_streaming_datasets() -> None:
    data = datasets.Dataset.from_dict({"ids": list(range(11)), "other": ["text"] * 11}).to_iterable_dataset()
    assert train(data, max_steps=4).model.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [0, 1, 2, 3]]


@pytest.mark.parametrize("workers", [0, 2])
def test_streaming_datasets_shuffle_anew_in_every_epoch(workers: int) -> None:
    data = datasets.Dataset.from_dict({"ids": list(range(12))}).to_iterable_dataset(num_shards=2)
    shuffled = data.shuffle(seed=3, buffer_size=12)
    trainer = train(shuffled, max_steps=8, dataloader_num_workers=workers, per_device_train_batch_size=3)
    first, second = trainer.model.batches[:4], trainer.model.batches[4:]
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(12))
    assert first != second


@pytest.mark.parametrize("mix", [datasets.interleave_datasets, datasets.concatenate_datasets])
def test_shuffle_buffers_of_mixed_streams_lose_nothing_when_a_run_resumes(mix: Any, tmp_path: Path) -> None:
    def stream() -> Any:
        parts = [datasets.Dataset.from_dict({"ids": list(range(a, a + 12))}).to_iterable_dataset() for a in (0, 100)]
        return mix([parts[0].shuffle(seed=1, buffer_size=6), parts[1]])

    def trained(folder: str, resume: str | None = None) -> Any:
        return train(stream(), output_dir=str(tmp_path / folder), max_steps=6, per_device_train_batch_size=3,
                     save_strategy="steps", save_steps=2, resume=resume)  # fmt: skip

    whole = trained("whole")
    for step in (2, 4):
        part = trained(f"from-{step}", str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert part.model.batches == whole.model.batches, "the batches before the checkpoint are saved in the model"


def test_a_streamed_dataset_without_max_steps_says_so() -> None:
    with pytest.raises(ArgumentsError, match="no length.*max_steps"):
        train(Stream())


def test_a_run_ends_when_the_data_does_although_more_steps_were_asked_for(caplog: Any) -> None:
    """A stream that can be read only once cannot give another epoch."""

    class Once(IterableDataset):
        def __init__(self) -> None:
            self.rows = iter([{"ids": i} for i in range(8)])

        def __iter__(self) -> Any:
            return self.rows

    trainer = train(Once(), max_steps=10)
    assert trainer.state.global_step == 2
    assert "returned no batch in epoch 1" in caplog.text


# ---- random numbers in the data -------------------------------------------------------------------------------------


FINALIZED: list[int] = []


class Garbage:
    """Something only the collector can find, whose finalizer belongs to the process that made it."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        FINALIZED.append(1)


def test_workers_do_not_collect_what_the_main_process_left() -> None:
    """A process group waits in its finalizer for its threads, which a forked worker does not have."""

    class Collecting(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, Any]:
            gc.collect()
            return {"x": torch.ones(2), "labels": torch.tensor(float(len(FINALIZED)))}

    gc.collect()
    FINALIZED.clear()
    gc.disable()
    try:
        Garbage()
        args = TrainingArguments("out", dataloader_num_workers=1, use_cpu=True)
        loader = build_loader(Collecting(), args=args, batch_size=2, collate_fn=default_collate)
        assert [float(batch["labels"].sum()) for batch in loader] == [0.0, 0.0]
    finally:
        gc.enable()
    gc.collect()
    assert FINALIZED == [1], "the main process does"


@pytest.mark.parametrize(
    "data", [Augmented, lambda: datasets.Dataset.from_dict({"ids": list(range(11))})], ids=["own", "lazy"]
)
def test_draws_in_the_data_do_not_depend_on_the_number_of_workers(data: Any) -> None:
    def augment(rows: dict[str, Any]) -> dict[str, Any]:
        draws = [[random.random(), float(np.random.rand()), torch.rand(()).item()] for _ in rows["ids"]]
        return {**rows, "draws": draws}

    runs = []
    for workers in (1, 2, 3):
        made = data()
        if hasattr(made, "set_transform"):
            made.set_transform(augment)
        model = train(made, num_train_epochs=2, dataloader_num_workers=workers).model
        runs.append((model.batches, model.draws))
    assert runs[0] == runs[1] == runs[2]
    draws = torch.tensor(runs[0][1])
    assert draws.shape == (22, 3)
    assert len(draws[:, 0].unique()) == 22, "two samples drew the same number"


def test_draws_without_workers_come_from_the_global_streams() -> None:
    ours, theirs = train(Augmented()), train(Augmented(), transformers)
    assert ours.model.draws == theirs.model.draws


@pytest.mark.parametrize(
    "options", [{}, {"dataloader_prefetch_factor": 1}, {"dataloader_persistent_workers": True}], ids=str
)
def test_draws_in_workers_are_the_same_however_they_are_run(options: dict[str, Any]) -> None:
    plain = train(Augmented(), dataloader_num_workers=1).model
    other = train(Augmented(), dataloader_num_workers=2, **options).model
    assert other.batches == plain.batches
    assert other.draws == plain.draws


def test_evaluation_leaves_the_draws_of_training_alone() -> None:
    runs = []
    for options in ({}, {"eval_strategy": "steps", "eval_steps": 2}):
        args = TrainingArguments("run", max_steps=6, per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True,
                                 save_strategy="no", **options)  # fmt: skip
        trainer = Trainer(Recorder(), args, train_dataset=Augmented(), eval_dataset=Augmented(5))
        training: list[Any] = []
        step = trainer.training_step
        trainer.training_step = lambda model, inputs, step=step, training=training: (
            training.append(inputs["draws"].tolist()), step(model, inputs))[1]  # fmt: skip
        trainer.train()
        runs.append(training)
    assert runs[0] == runs[1] and len(runs[0]) == 6


# ---- grouping by length ---------------------------------------------------------------------------------------------


class Sentences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.batches: list[list[int]] = []

    def forward(self, input_ids: torch.Tensor, number: torch.Tensor, size: torch.Tensor | None = None) -> Any:
        self.batches.append(number.tolist())
        return {"loss": (self.w * input_ids.float().mean()).sum()}


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    return {
        "input_ids": nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "number": torch.tensor([sample["number"] for sample in samples]),
    }


LENGTHS = [int(n) for n in np.random.RandomState(0).randint(1, 100, 64)]
SENTENCES = [{"input_ids": [1] * n, "number": i} for i, n in enumerate(LENGTHS)]


def grouped(data: Any, **options: Any) -> Sentences:
    args = TrainingArguments("run", per_device_train_batch_size=4, num_train_epochs=2, use_cpu=True, disable_tqdm=True,
                             save_strategy="no", **options)  # fmt: skip
    trainer = Trainer(Sentences(), args, train_dataset=data, data_collator=pad)
    trainer.train()
    return trainer.model


def padding(model: Sentences) -> float:
    """Padded places per batch."""
    sizes = [[LENGTHS[i] for i in batch] for batch in model.batches]
    return sum(max(batch) * len(batch) - sum(batch) for batch in sizes) / len(sizes)


@pytest.mark.parametrize(
    "spelling", [{"train_sampling_strategy": "group_by_length"}, {"group_by_length": True}], ids=str
)
def test_grouping_by_length_pads_less_and_loses_no_sample(spelling: dict[str, Any]) -> None:
    plain, together = grouped(SENTENCES), grouped(SENTENCES, **spelling)
    assert padding(together) < padding(plain) / 2
    for epoch in (together.batches[:16], together.batches[16:]):
        assert sorted(sum(epoch, [])) == list(range(64))
    assert together.batches[:16] != together.batches[16:]
    assert LENGTHS[together.batches[0][0]] == max(LENGTHS)


def test_grouping_by_length_reads_the_length_column() -> None:
    """Lengths the samples do not have: only the column can have decided."""
    claimed = [{**sample, "size": 100 - len(sample["input_ids"])} for sample in SENTENCES]
    options = {"train_sampling_strategy": "group_by_length"}
    by_column = grouped(datasets.Dataset.from_list(claimed), length_column_name="size", **options)
    assert LENGTHS[by_column.batches[0][0]] == min(LENGTHS)
    assert grouped(claimed, length_column_name="size", **options).batches == by_column.batches
    assert grouped(claimed, **options).batches != by_column.batches


def test_grouping_by_length_needs_lengths() -> None:
    with pytest.raises(ArgumentsError, match="group_by_length.*stream"):
        train(Stream(), max_steps=3, train_sampling_strategy="group_by_length")
    with pytest.raises(DataError, match="'length' or 'input_ids'.*ids"):
        train(Mapped(), train_sampling_strategy="group_by_length")


# ---- what users bring -----------------------------------------------------------------------------------------------


class EpochSampler(Sampler):
    def __init__(self, n: int) -> None:
        self.n, self.epochs = n, []

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Any:
        shift = self.epochs[-1]
        return iter([(i + shift) % self.n for i in range(self.n)])

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_a_sampler_of_the_users_own_is_told_the_epoch() -> None:
    sampler = EpochSampler(8)

    class Theirs(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return sampler

    args = TrainingArguments("run", per_device_train_batch_size=4, num_train_epochs=2, use_cpu=True, disable_tqdm=True,
                             save_strategy="no")  # fmt: skip
    trainer = Theirs(Recorder(), args, train_dataset=Mapped(8))
    trainer.train()
    assert sampler.epochs == [0, 1]
    assert trainer.model.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [1, 2, 3, 4], [5, 6, 7, 0]]


def test_a_loader_of_the_users_own_is_told_the_epoch() -> None:
    class Loader(DataLoader):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class Theirs(Trainer):
        def get_train_dataloader(self):
            return Loader(self.train_dataset, batch_size=4)

    args = TrainingArguments("run", num_train_epochs=3, use_cpu=True, disable_tqdm=True, save_strategy="no")
    Theirs(Recorder(), args, train_dataset=Mapped(8)).train()
    assert Loader.epochs == [0, 1, 2]


class KnowsItsEpoch(Mapped):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": 100 * self.epoch + index}


@pytest.mark.parametrize(
    "options",
    [{}, {"dataloader_num_workers": 2}, {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}],
    ids=str,
)
def test_a_dataset_that_knows_its_epoch_is_told_it(options: dict[str, Any]) -> None:
    batches = seen(KnowsItsEpoch(4), num_train_epochs=3, **options)
    assert [sorted(batch) for batch in batches] == [[100 * e + i for i in range(4)] for e in range(3)]


def test_own_batch_sampler_loader() -> None:
    class Theirs(Trainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_sampler=[[0, 1], [2, 3, 4]])

    args = TrainingArguments("run", num_train_epochs=2, use_cpu=True, disable_tqdm=True, save_strategy="no")
    trainer = Theirs(Recorder(), args, train_dataset=Mapped())
    trainer.train()
    assert trainer.model.batches == [[0, 1], [2, 3, 4]] * 2


# ---- columns --------------------------------------------------------------------------------------------------------


def test_a_lazy_transform_may_use_a_column_the_model_does_not_take(caplog: Any) -> None:
    data = datasets.Dataset.from_dict({"text": ["a", "bb", "ccc", "dddd"], "row": [0, 1, 2, 3]})
    data.set_transform(lambda rows: {"ids": [len(text) for text in rows["text"]], "row": rows["row"]})
    for workers in (0, 2):
        trainer = train(data, num_train_epochs=1, dataloader_num_workers=workers)
        assert sorted(trainer.model.seen) == [1, 2, 3, 4]
    assert data.column_names == ["text", "row"], "the dataset was edited"


def test_withheld_columns_are_named_once(caplog: Any) -> None:
    data = [{"ids": i, "name": f"sample {i}", "url": "..."} for i in range(8)]
    caplog.set_level(logging.INFO, "loopwright")
    train(data)
    told = [record.getMessage() for record in caplog.records if "removed columns" in record.getMessage()]
    assert len(told) == 1
    assert "name, url" in told[0]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_withheld_columns_are_named_once_with_workers_too(start: str, capfd: Any) -> None:
    """Whoever says it, worker or main process, it is one line on the terminal for the whole run."""
    terminal = logging.StreamHandler()  # its stream is that of the process it runs in
    logger = logging.getLogger("loopwright")
    logger.addHandler(terminal)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        data = [{"ids": i, "name": f"sample {i}"} for i in range(8)]
        options = {"dataloader_num_workers": 2, "dataloader_multiprocessing_context": start}
        train(data, num_train_epochs=2 if start == "fork" else 1, **options)
    finally:
        logger.removeHandler(terminal)
        logger.setLevel(level)
    told = [line for line in capfd.readouterr().err.splitlines() if "removed columns" in line]
    assert len(told) == 1 and "name" in told[0]


def test_a_collator_of_the_users_own_sees_all_columns() -> None:
    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {"ids": torch.tensor([len(sample["text"]) for sample in samples]), "text": [s["text"] for s in samples]}

    args = TrainingArguments("run", max_steps=1, per_device_train_batch_size=2, use_cpu=True, disable_tqdm=True,
                             save_strategy="no")  # fmt: skip
    trainer = Trainer(Recorder(), args, data_collator=collate, train_dataset=[{"text": "a"}, {"text": "bb"}])
    trainer.train()
    assert sorted(trainer.model.seen) == [1, 2]


def test_a_model_that_takes_anything_is_given_everything() -> None:
    class Anything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))
            self.columns: set[str] = set()

        def forward(self, **batch: torch.Tensor) -> Any:
            self.columns |= set(batch)
            return {"loss": self.w.sum()}

    args = TrainingArguments("run", max_steps=1, use_cpu=True, disable_tqdm=True, save_strategy="no")
    trainer = Trainer(Anything(), args, train_dataset=[{"a": 1.0, "b": 2.0, "label": 1}])
    trainer.train()
    assert trainer.model.columns >= {"a", "b"}


def test_batches_that_are_no_dicts_reach_an_override_as_they_are() -> None:
    class Theirs(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            x, y = inputs
            outputs = model(x)
            loss = nn.functional.mse_loss(outputs, y)
            return (loss, outputs) if return_outputs else loss

    data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    args = TrainingArguments("run", max_steps=2, per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True,
                             save_strategy="no", logging_steps=1)  # fmt: skip
    trainer = Theirs(nn.Linear(2, 1), args, train_dataset=data, data_collator=torch.utils.data.default_collate)
    trainer.train()
    assert len([row for row in trainer.state.log_history if "loss" in row]) == 2


def test_a_collator_of_the_users_own_that_chokes_on_extra_columns_is_spared_them(tmp_path: Path) -> None:
    def strict(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in samples[0]}

    data = [{**sample, "text": "words"} for sample in regression_data(8)]
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, save_strategy="no", disable_tqdm=True)
    assert Trainer(Regression(), args, strict, train_dataset=data).train().global_step == 2


def test_a_replaced_iteration_of_loaders_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by tools that measure the time of loading."""
    kind: Any = torch.utils.data.dataloader._BaseDataLoaderIter
    called, plain = [], kind.__next__

    def timed(batches: Any) -> Any:
        called.append(1)
        return plain(batches)

    monkeypatch.setattr(kind, "__next__", timed)
    args = TrainingArguments(str(tmp_path), max_steps=3, use_cpu=True, save_strategy="no", disable_tqdm=True)
    Trainer(Regression(), args, train_dataset=regression_data(40)).train()
    assert len(called) >= 3

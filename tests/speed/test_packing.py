"""batch_packing="across_updates" in a trainer: which samples share an update, its gradient, its epochs, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from loopwright import (
    ArgumentsError,
    CheckpointError,
    DataError,
    NotAvailable,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from loopwright.core.order import Order
from loopwright.core.sampling.packing import next_fit
from loopwright.core.update import Place
from loopwright.pt.data.loaders import torch_permutation
from loopwright.pt.distributed.sync import SharedLoss
from loopwright.pt.internals import TorchInternals
from loopwright.speed.planner.decision import COLLATED, FLAT, PAIRED, UNPADDED
from loopwright.speed.proof.distance import gradient_distance
from tests.speed.architectures import build, collate, samples
from tests.speed.training import Run, train
from tests.spreads import some, spread

pytest.importorskip("transformers")
DATA = samples(40, "causal")
LENGTHS = [len(sample["input_ids"]) for sample in DATA]
BUDGET = 100
PACKED: dict[str, Any] = {
    "batch_packing": "across_updates", "per_device_train_batch_tokens": BUDGET, "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 8,
}  # fmt: skip


def fresh() -> nn.Module:
    return build("llama", "causal")


class Watching(SharedLoss):
    def make_update(self, batches: list[Any]) -> Any:
        trainer: Any = self.trainer
        trainer.seen.append([identify(batch) for batch in batches])
        trainer.places.append((self.run.progress.epoch, self.run.progress.samples_in_epoch))
        update = super().make_update(batches)
        assert update.samples == sum(map(len, trainer.seen[-1]))
        return update


class WatchedInternals(TorchInternals):
    loss_class = Watching


class Watched(Trainer):
    """Keeps which samples every micro-batch came with, known by their tokens."""

    _loopwright_class = WatchedInternals

    def __init__(self, *args: Any, **options: Any) -> None:
        self.seen: list[list[list[int]]] = []
        self.places: list[tuple[int, int]] = []
        super().__init__(*args, **options)


KNOWN = {tuple(sample["input_ids"].tolist()): i for i, sample in enumerate(DATA)}


def identify(batch: Any) -> list[int]:
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [KNOWN[tuple(ids[mask.bool()].tolist())] for ids, mask in rows]


def expected(epoch: int, budget: int = BUDGET) -> list[list[int]]:
    """The micro-batches of an epoch, found by adding up."""
    order = Order(n=len(DATA), seed=42, permute=torch_permutation).epoch(epoch).tolist()
    found: list[list[int]] = []
    for index in order:
        if found and sum(LENGTHS[i] for i in found[-1]) + LENGTHS[index] <= budget:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def packed(model: Any, folder: Path, data: Any = DATA, kind: type[Trainer] = Watched, **options: Any) -> Run:
    return train(model, data, folder, kind=kind, **{**PACKED, **options})


# ---- which samples share an update -----------------------------------------------------------------------------------


def test_the_samples_can_be_told_apart() -> None:
    assert len(KNOWN) == len(DATA)


def test_a_micro_batch_is_what_fits_and_one_row(tmp_path: Any) -> None:
    run = packed(fresh(), tmp_path, max_steps=-1, num_train_epochs=2)
    assert [each for update in run.trainer.seen for each in update] == expected(0) + expected(1)
    assert run.plan.layout == FLAT
    tokens = [sum(LENGTHS[i] for i in batch) for batch in expected(0) + expected(1)]
    assert run.shapes == [[(1, count)] for count in tokens], "one row without padding each"
    assert len({len(batch) for batch in expected(0)}) > 2, "updates differ in samples"
    assert sum(tokens) > 0.8 * BUDGET * len(tokens), "and not in tokens"


@pytest.mark.parametrize("accumulation", [3, pytest.param(2, marks=pytest.mark.grid)])
def test_accumulation_takes_as_many_micro_batches_and_no_more_rows(accumulation: int, tmp_path: Any) -> None:
    run = packed(fresh(), tmp_path, gradient_accumulation_steps=accumulation, max_steps=-1, num_train_epochs=2)
    for epoch in (0, 1):
        batches = expected(epoch)
        windows = [batches[i : i + accumulation] for i in range(0, len(batches), accumulation)]
        mine = [each for each, place in zip(run.trainer.seen, run.trainer.places, strict=True) if place[0] == epoch]
        assert mine == windows
    for update, shapes in zip(run.trainer.seen, run.shapes, strict=True):
        assert len(shapes) <= len(update) and all(rows == 1 and width <= BUDGET for rows, width in shapes)


@pytest.mark.parametrize("options", [{"dataloader_num_workers": 2}, {"dataloader_num_workers": 1, "speed": "max"}])
def test_loading_processes_give_the_same_micro_batches(options: dict[str, Any], tmp_path: Any) -> None:
    run = packed(fresh(), tmp_path, max_steps=-1, num_train_epochs=2, dataloader_persistent_workers=True, **options)
    assert [each for update in run.trainer.seen for each in update] == expected(0) + expected(1)


@pytest.mark.parametrize("strategy", ["sequential", "group_by_length"])
def test_the_order_is_that_of_the_sampling_strategy(strategy: str, tmp_path: Any) -> None:
    run = packed(fresh(), tmp_path, train_sampling_strategy=strategy, max_steps=-1, num_train_epochs=1)
    order = Order(n=len(DATA), seed=42, strategy=strategy, lengths=LENGTHS, group_size=8, permute=torch_permutation)
    flat = [index for update in run.trainer.seen for batch in update for index in batch]
    assert flat == order.epoch(0).tolist()
    assert len(run.trainer.seen) == len(next_fit([LENGTHS[i] for i in flat], BUDGET))


def test_drop_last_leaves_out_what_the_end_of_the_data_cut_short(tmp_path: Any) -> None:
    run = packed(fresh(), tmp_path, dataloader_drop_last=True, max_steps=-1, num_train_epochs=2)
    assert [each for update in run.trainer.seen for each in update] == expected(0)[:-1] + expected(1)[:-1]
    assert run.trainer.state.epoch == 2.0


def test_drop_last_of_all_there_is_says_so(tmp_path: Any) -> None:
    with pytest.raises(DataError, match="returned no batch"):
        packed(fresh(), tmp_path, dataloader_drop_last=True, per_device_train_batch_tokens=10**6)


def test_a_sample_that_never_fits_is_alone_and_said_once(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    budget = 30
    run = packed(fresh(), tmp_path, per_device_train_batch_tokens=budget, max_steps=-1, num_train_epochs=2)
    assert [each for update in run.trainer.seen for each in update] == expected(0, budget) + expected(1, budget)
    too_long = sum(length > budget for length in LENGTHS)
    line = f"packing: {too_long} of 40 samples are longer than per_device_train_batch_tokens=30"
    assert too_long and caplog.text.count(line) == 1


# ---- how long a sample is --------------------------------------------------------------------------------------------


def test_the_length_column_is_believed(tmp_path: Any) -> None:
    data = [{**sample, "length": torch.tensor(50)} for sample in DATA]
    run = packed(fresh(), tmp_path, data, max_steps=3)
    assert [len(batch) for update in run.trainer.seen for batch in update] == [2, 2, 2]
    named = [{**sample, "n": 25} for sample in DATA]
    run = packed(fresh(), tmp_path, named, max_steps=3, length_column_name="n")
    assert [len(batch) for update in run.trainer.seen for batch in update] == [4, 4, 4]


def test_columns_of_a_dataset_are_measured(tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {name: [sample[name].tolist() for sample in DATA] for name in ("input_ids", "labels")}
    data = datasets.Dataset.from_dict(columns).with_format("torch")
    run = packed(fresh(), tmp_path, data, max_steps=-1, num_train_epochs=1)
    assert [each for update in run.trainer.seen for each in update] == expected(0)
    run = packed(fresh(), tmp_path, data.add_column("length", [50] * len(DATA)), max_steps=3)
    assert [len(batch) for update in run.trainer.seen for batch in update] == [2, 2, 2]


def test_pairs_count_with_both_their_sides(tmp_path: Any) -> None:
    data = samples(24, "pair")
    run = packed(build("t5", "pair"), tmp_path, data, kind=Trainer, max_steps=-1, num_train_epochs=1)
    packing = run.trainer._loopwright.run.plan.packing
    assert packing.lengths.tolist() == [len(sample["input_ids"]) + len(sample["labels"]) for sample in data]
    assert run.plan.layout == PAIRED and run.trainer._loopwright.run.progress.samples_seen == 24


def test_samples_without_a_length_are_refused(tmp_path: Any) -> None:
    data = [{"text": "a b c"} for _ in range(4)]
    with pytest.raises(DataError, match="packing needs a column 'length' or 'input_ids', but the samples have text"):
        packed(fresh(), tmp_path, data)


class Ragged(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples that are drawn anew, and of another length, each time they are looked at."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(5, 64, (int(torch.randint(3, 40, ())),))
        return {"input_ids": ids, "labels": ids.clone()}


def test_measuring_draws_no_number_and_gives_the_same_lengths_each_time(tmp_path: Any) -> None:
    trainer = Trainer(fresh(), TrainingArguments(str(tmp_path), use_cpu=True, **PACKED), train_dataset=Ragged())
    before = torch.get_rng_state()
    found = [trainer.get_train_dataloader().batch_sampler.packing.lengths.tolist() for _ in range(2)]
    assert found[0] == found[1] and torch.equal(before, torch.get_rng_state())


# ---- the gradient ----------------------------------------------------------------------------------------------------


class OwnStep(Trainer):
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        assert inputs["attention_mask"].dim() == 2
        return super().training_step(model, inputs, num_items_in_batch)


LAID = [
    ("llama", "causal", FLAT, Trainer),
    ("gpt2", "causal", FLAT, Trainer),
    ("bert", "class", UNPADDED, Trainer),
    ("bert", "tokens", FLAT, Trainer),
    ("t5", "pair", PAIRED, Trainer),
    ("llama", "causal", COLLATED, OwnStep),
]


@pytest.mark.parametrize(("case", "accumulation"), spread(LAID, [3, 1]), ids=str)
def test_an_update_is_that_of_its_samples_in_one_padded_batch(
    case: tuple[str, str, str, type[Trainer]], accumulation: int, doubles_stay: None, tmp_path: Any
) -> None:
    name, task, layout, kind = case
    data = samples(30, task)
    run = packed(
        build(name, task), tmp_path / "packed", data, kind, gradient_accumulation_steps=accumulation, learning_rate=0.0
    )
    assert run.trainer._loopwright.run.progress.samples_seen > accumulation
    assert run.plan.layout == layout, run.plan.lines()
    taken = run.trainer._loopwright.run.plan.packing.order.epoch(0)[
        : run.trainer._loopwright.run.progress.samples_seen
    ].tolist()
    plain = train(
        build(name, task), [data[i] for i in taken], tmp_path / "plain", learning_rate=0.0, speed="off",
        per_device_train_batch_size=len(taken), gradient_accumulation_steps=1, train_sampling_strategy="sequential",
    )  # fmt: skip
    assert run.loss == pytest.approx(plain.loss, rel=1e-10)
    assert run.gradients.keys() == plain.gradients.keys()
    assert gradient_distance([*plain.gradients.values()], [*run.gradients.values()]) < 1e-10


def test_samples_that_need_no_padding_by_chance_do_not_settle_the_layout(tmp_path: Any) -> None:
    long = [{name: value[:1].repeat(90) % 64 for name, value in DATA[i].items()} for i in range(2)]
    model = build("llama", "causal")
    run = packed(model, tmp_path, [*long, *DATA], Trainer, train_sampling_strategy="sequential", max_steps=4)
    assert run.shapes[0] == [(1, 90)] and run.plan.layout == FLAT
    assert run.shapes[2][0][0] == 1 and run.shapes[3][0][0] == 1


def test_where_nothing_is_proved_batches_are_padded_and_that_is_said(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Blind(nn.Module):
        """Computes with its padding."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> dict[str, Any]:
            hidden = self.embed(input_ids)
            hidden = hidden + hidden.mean(1, keepdim=True)
            return {"loss": nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}

    torch.manual_seed(0)
    run = packed(Blind(), tmp_path / "blind", max_steps=2)
    assert run.plan.layout == COLLATED and run.shapes[0][0][0] == len(expected(0)[0])
    assert caplog.text.count("padded and may have more tokens, since no padding-free layout is verified here") == 1
    packed(fresh(), tmp_path / "own", kind=OwnStep)
    assert "batch_tokens is not enforced because batches are padded: training_step is over" in caplog.text


def test_memory_that_runs_out_changes_rows_and_not_updates(tmp_path: Any) -> None:
    class Small(Watched):
        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            if inputs["input_ids"].numel() > 60 and model.training and not self._loopwright.is_probing:
                raise torch.OutOfMemoryError("a small device")
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

    whole = packed(fresh(), tmp_path, max_steps=-1, num_train_epochs=1)
    run = packed(fresh(), tmp_path, kind=Small, max_steps=-1, num_train_epochs=1, auto_find_batch_size=True)
    assert run.trainer.seen == whole.trainer.seen and run.trainer.state.epoch == 1.0
    assert run.losses == pytest.approx(whole.losses, rel=1e-6)
    assert max(len(shapes) for shapes in run.shapes) > 1


# ---- epochs ----------------------------------------------------------------------------------------------------------


class Ends(TrainerCallback):
    def __init__(self) -> None:
        self.epochs: list[Any] = []
        self.steps: list[int] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epochs.append(state.epoch)
        self.steps.append(state.global_step)


def different_counts(accumulation: int = 1) -> list[int]:
    return [-(-len(expected(epoch)) // accumulation) for epoch in range(4)]


@pytest.mark.parametrize("accumulation", [2, pytest.param(1, marks=pytest.mark.grid)])
def test_epochs_end_at_whole_numbers_and_the_schedule_with_them(accumulation: int, tmp_path: Any) -> None:
    ends, counts = Ends(), different_counts(accumulation)
    assert len({len(expected(epoch)) for epoch in range(4)}) > 1, "epochs differ"
    run = packed(
        fresh(), tmp_path, gradient_accumulation_steps=accumulation, max_steps=-1, num_train_epochs=4,
        given={"callbacks": [ends]}, learning_rate=0.1,
    )  # fmt: skip
    state = run.trainer.state
    assert ends.epochs == [1.0, 2.0, 3.0, 4.0]
    assert ends.steps == [sum(counts[: k + 1]) for k in range(4)]
    assert (state.epoch, state.num_train_epochs) == (4.0, 4)
    assert state.global_step == state.max_steps == sum(counts)
    assert run.trainer._loopwright.run.progress.samples_seen == 4 * len(DATA)
    assert run.trainer.lr_scheduler.get_last_lr() == [0.0, 0.0]
    assert run.trainer.set_initial_training_values(run.trainer.args, run.trainer._loopwright.run.loader) == (
        4, counts[0], len(DATA), 4 * len(DATA), 8 * accumulation, len(expected(0)), sum(counts)
    )  # fmt: skip


def test_a_part_of_an_epoch_is_a_part_of_its_own_updates(tmp_path: Any) -> None:
    run = packed(fresh(), tmp_path, max_steps=-1, num_train_epochs=1.5)
    counts = different_counts()
    assert run.trainer.state.global_step == counts[0] + -(-counts[1] // 2)
    assert run.trainer.state.epoch == pytest.approx(1 + -(-counts[1] // 2) / counts[1])


def test_max_steps_stop_where_they_say(tmp_path: Any) -> None:
    counts = different_counts()
    run = packed(fresh(), tmp_path, max_steps=counts[0] + 2)
    state = run.trainer.state
    assert state.global_step == counts[0] + 2 and state.num_train_epochs == 2
    assert state.epoch == pytest.approx(1 + 2 / counts[1])


def test_evaluation_is_not_packed(tmp_path: Any) -> None:
    options = {"eval_strategy": "epoch", "num_train_epochs": 1, "max_steps": -1, "learning_rate": 0.0}
    seen = []
    for more in (PACKED, {"speed": "off"}):
        run = train(fresh(), DATA, tmp_path, given={"eval_dataset": DATA[:20]}, **{**options, **more})
        seen.append([row["eval_loss"] for row in run.trainer.state.log_history if "eval_loss" in row])
        assert len(run.trainer.get_eval_dataloader()) == 3
    assert len(seen[0]) == 1 and seen[0] == seen[1]


# ---- going on --------------------------------------------------------------------------------------------------------


def same_weights(a: Run, b: Run) -> bool:
    mine, theirs = a.trainer.model.state_dict(), b.trainer.model.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("place", "accumulation", "workers"),
    some(
        [
            ("in epoch 0", 1, 0), ("in epoch 0", 2, 0), ("in epoch 0", 2, 2), ("after epoch 0", 2, 0),
            ("after epoch 0", 1, 0), ("in epoch 1", 1, 0), ("in epoch 1", 2, 2),
        ],
        step=3,
    ),
)  # fmt: skip
def test_a_resumed_run_is_the_same_to_the_last_bit(place: str, accumulation: int, workers: int, tmp_path: Any) -> None:
    counts = different_counts(accumulation)
    at = {"in epoch 0": 3, "after epoch 0": counts[0], "in epoch 1": counts[0] + 2}[place]
    options: dict[str, Any] = {
        "max_steps": -1, "num_train_epochs": 2, "learning_rate": 0.1, "optim": "adamw_torch",
        "gradient_accumulation_steps": accumulation, "dataloader_num_workers": workers,
    }  # fmt: skip
    whole = packed(fresh(), tmp_path / "whole", **options)
    saving = {**options, "save_strategy": "steps", "save_steps": at}
    packed(fresh(), tmp_path / "cut", **saving)
    rest = packed(fresh(), tmp_path / "cut", resume=str(tmp_path / "cut" / f"checkpoint-{at}"), **saving)
    assert rest.trainer.seen == whole.trainer.seen[at:] and rest.shapes == whole.shapes[at:]
    assert same_weights(whole, rest)
    logs = [
        [(row["step"], row["epoch"], row.get("loss")) for row in run.trainer.state.log_history] for run in (whole, rest)
    ]
    assert logs[0] == logs[1] and rest.trainer.state.epoch == 2.0


SAVING: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run with checkpoints, and where they are."""
    folder = tmp_path_factory.mktemp("saved")
    return packed(fresh(), folder, **SAVING), folder


@pytest.mark.parametrize(
    "changed",
    [
        {"per_device_train_batch_tokens": 60},
        {"per_device_train_batch_tokens": 250},
        {"gradient_accumulation_steps": 2},
        {"batch_packing": None, "per_device_train_batch_tokens": None, "speed": "off"},
    ],
    ids=str,
)
def test_with_another_budget_the_rest_of_the_epoch_still_comes_once(
    changed: dict[str, Any], saved: tuple[Run, Path], tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first, folder = saved
    done = [index for update in first.trainer.seen[:3] for batch in update for index in batch]
    rest = packed(fresh(), tmp_path, resume=str(folder / "checkpoint-3"), **{**SAVING, **changed})
    seen = [index for update in rest.trainer.seen for batch in update for index in batch]
    assert sorted([*done, *seen]) == sorted([*range(40), *range(40)])
    assert sorted([*done, *seen[: 40 - len(done)]]) == list(range(40))
    assert rest.trainer.state.epoch == 2.0
    assert rest.trainer.state.global_step == rest.trainer.state.max_steps == 3 + len(rest.trainer.seen)
    assert "the effective batch size differs from checkpoint-3: after its 3 steps there are" in caplog.text


def test_the_samples_of_an_update_can_be_loaded_again(tmp_path: Any) -> None:
    run = packed(fresh(), tmp_path, gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=2)
    for update, (epoch, first) in zip(run.trainer.seen, run.trainer.places, strict=True):
        indices, batches = run.trainer._loopwright.data.samples_at(Place(epoch, first, sum(map(len, update))))
        assert indices == [index for batch in update for index in batch]
        assert [identify(batch) for batch in batches] == update


# ---- what is refused -------------------------------------------------------------------------------------------------


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(DATA)


class OwnSampler(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=collate)


@pytest.mark.parametrize(
    ("kind", "data", "reason"),
    [
        (Trainer, Stream(), "batch_packing='across_updates' needs a map-style dataset with a length"),
        (OwnSampler, DATA, r"own sampling order.*_get_train_sampler is overridden \(SequentialSampler\)"),
        (OwnLoader, DATA, r"own sampling order.*get_train_dataloader or _get_train_sampler is overridden"),
    ],
)
def test_an_order_that_is_not_ours_is_refused(kind: type[Trainer], data: Any, reason: str, tmp_path: Any) -> None:
    with pytest.raises(ArgumentsError, match=reason):
        packed(fresh(), tmp_path, data, kind, max_steps=2)


def test_several_processes_are_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(fresh(), TrainingArguments(str(tmp_path), use_cpu=True, **PACKED), train_dataset=DATA)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        NotAvailable, match="batch_packing='across_updates' is not available yet with 2 processes .WORLD_SIZE."
    ):
        trainer.get_train_dataloader()


def test_a_checkpoint_that_only_counts_updates_is_refused(tmp_path: Any) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "checkpoint_format": "transformers"}
    packed(fresh(), tmp_path, **saving)
    folder = tmp_path / "checkpoint-2"
    for name in ("progress.json", "manifest.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="do not identify the samples used"):
        packed(fresh(), tmp_path, resume=str(folder), **saving)


def test_the_budget_is_asked_for(tmp_path: Any) -> None:
    with pytest.raises(ArgumentsError, match="batch_packing='across_updates' needs per_device_train_batch_tokens"):
        TrainingArguments(str(tmp_path), batch_packing="across_updates")

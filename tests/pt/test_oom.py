"""Out of memory: the same update in smaller micro-batches, with the same result."""

from __future__ import annotations

import copy
import inspect
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from loopwright.pt.loss.splitter import BatchSplitter, CannotSplit, split_all
from loopwright.pt.precision import Precision
from loopwright.pt.strategies.single import SingleDevice
from loopwright.speed.memory.out_of_memory import is_out_of_memory
from tests import models
from tests.models import LENGTHS, ShiftedTokens, Tokens, made, samples, trainer_of, weights
from tests.spreads import spread


def limited(model: nn.Module, most: int, error: type[BaseException] = torch.OutOfMemoryError) -> nn.Module:
    """A copy of the model that runs out of memory on more than so many samples."""
    model = copy.deepcopy(model)
    forward = type(model).forward

    def small(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        self.asked.append(len(input_ids))
        if len(input_ids) > self.most:
            raise error("out of memory" if issubclass(error, RuntimeError) else "")
        return forward(self, input_ids=input_ids, **kwargs)

    small.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.__class__ = type("Limited", (type(model),), {"forward": small})
    model.most, model.asked = most, []
    return model


RUN = {"num_train_epochs": 2, "auto_find_batch_size": True, "per_device_train_batch_size": 7}


def device_with(model: nn.Module) -> SingleDevice:
    device = SingleDevice(torch.device("cpu"), Precision())
    device.setup_model(model)
    return device


def both(model: nn.Module, most: int, folder: Any, data: Any = None, **options: Any) -> tuple[Any, Any]:
    """The run that always fits, and the one that does not."""
    data = samples() if data is None else data
    free = trainer_of(limited(model, 10**6), data, folder / "free", **{**RUN, **options})
    free.train()
    tight = trainer_of(limited(model, most), data, folder / "tight", **{**RUN, **options})
    tight.train()
    return free, tight


def assert_same_run(free: Any, tight: Any) -> None:
    for mine, theirs in zip(tight.model.state_dict().values(), free.model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
    keys = ("step", "epoch", "loss")
    rows = [[tuple(row[key] for key in keys) for row in t.state.log_history if "loss" in row] for t in (free, tight)]
    assert len(rows[0]) == len(rows[1]) == free.state.global_step
    for mine, theirs in zip(*rows, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-10)


@pytest.mark.parametrize(("cls", "most"), spread([Tokens, ShiftedTokens], [1, 2, 3, 6]))
@pytest.mark.parametrize("accumulation", [1, 2])
def test_weights_and_logs_are_those_of_the_run_that_fits(
    cls: type, accumulation: int, most: int, tmp_path: Any
) -> None:
    data = samples((*LENGTHS, 4, 9, 2))
    free, tight = both(made(cls), most, tmp_path, data, gradient_accumulation_steps=accumulation)
    assert_same_run(free, tight)
    assert max(tight.model.asked) > most, "this run never ran out of memory"


@pytest.mark.parametrize("name", ["llama", "bert_classes"])
def test_transformers_models(name: str, doubles_stay: None, tmp_path: Any) -> None:
    model = getattr(models, name)()
    assert_same_run(*both(model, 2, tmp_path, samples(classes=name == "bert_classes")))


def test_running_statistics_see_every_sample_once(tmp_path: Any) -> None:
    class Normed(Tokens):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def logits(self, input_ids: Tensor) -> Tensor:
            return self.head(self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2))

    trainer = trainer_of(limited(made(Normed), 4), samples(), tmp_path, **{**RUN, "max_steps": 3})
    trainer.train()
    assert int(trainer.model.norm.num_batches_tracked) == 6, "two halves of each of three updates"


def test_the_user_is_told_and_the_found_size_stays(tmp_path: Any) -> None:
    _, tight = both(made(Tokens), 2, tmp_path)
    assert [text for text in tight._loopwright.notices.told if "out of memory" in text][-1].startswith(
        "out of memory: micro-batches are now split in 4"
    )
    second_epoch = tight.model.asked[-4:]
    assert max(second_epoch) <= 2 and sum(second_epoch) == 7, "the second update does not try the whole batch again"


def test_a_failed_try_leaves_no_trace(tmp_path: Any) -> None:
    """Random streams and buffers stand where they stood before it."""
    drawn: list[tuple[int, float, float, float, int]] = []

    class Drawing(Tokens):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
            self.calls += 1
            if trainer._loopwright.is_probing:
                return super().forward(input_ids, attention_mask, labels)
            numbers = (torch.rand(()).item(), random.random(), float(np.random.rand()))
            drawn.append((len(input_ids), *numbers, int(self.calls)))
            if len(input_ids) > 2:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(input_ids, attention_mask, labels)

    trainer = trainer_of(made(Drawing), samples(), tmp_path, **{**RUN, "max_steps": 1})
    trainer.train()
    tries = [each for each in drawn if each[0] > 2] + [next(each for each in drawn if each[0] <= 2)]
    assert [each[0] for each in tries[:2]] == [7, 4]
    assert len({each[1:] for each in tries}) == 1, "every try draws the same numbers and finds the same buffers"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_every_way_to_say_it_is_understood(error: type[BaseException], tmp_path: Any) -> None:
    trainer = trainer_of(limited(made(Tokens), 3, error), samples(), tmp_path, **RUN)
    assert trainer.train().global_step == 2


def test_other_errors_pass(tmp_path: Any) -> None:
    class Breaks(Tokens):
        def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
            raise RuntimeError("shapes do not fit")

    trainer = trainer_of(made(Breaks), samples(), tmp_path, **RUN)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        trainer.train()


def test_a_single_sample_that_does_not_fit_is_the_original_error(tmp_path: Any) -> None:
    trainer = trainer_of(limited(made(Tokens), 0), samples(), tmp_path, **RUN)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert min(trainer.model.asked) == 1


def test_without_the_argument_nothing_is_tried_again(tmp_path: Any) -> None:
    trainer = trainer_of(limited(made(Tokens), 3), samples(), tmp_path, **{**RUN, "auto_find_batch_size": False})
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert trainer.model.asked == [7]


def test_a_resumed_run_starts_with_the_size_that_was_found(tmp_path: Any) -> None:
    options = {**RUN, "save_strategy": "epoch", "num_train_epochs": 3}
    whole = trainer_of(limited(made(Tokens), 2), samples(), tmp_path / "a", **options)
    whole.train()
    again = trainer_of(limited(made(Tokens), 2), samples(), tmp_path / "a", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert max(again.model.asked[-8:]) == 2, "its two epochs do not try the whole batch again"
    for mine, theirs in zip(weights(again.model).values(), weights(whole.model).values(), strict=True):
        assert torch.equal(mine, theirs)


def test_failed_tensors_are_let_go_before_the_next_try(tmp_path: Any) -> None:
    held: list[weakref.ref[Tensor]] = []

    class Heavy(Tokens):
        def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
            assert not held or held[0]() is None, "the failed run's tensors are still there"
            activation = torch.zeros(3)
            if not held:
                held.append(weakref.ref(activation))
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(input_ids, attention_mask, labels)

    assert trainer_of(made(Heavy), samples(), tmp_path, **{**RUN, "max_steps": 1}).train().global_step == 1


# ---- cutting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("parts", [2, 4])
def test_pieces_put_together_are_the_batch(size: int, parts: int) -> None:
    rows = torch.arange(size)
    batch = {
        "x": rows[:, None].expand(size, 3),
        "nest": {"y": rows},
        "words": [str(i) for i in range(size)],
        "pair": (rows, rows + 1) if size != 2 else rows,
        "scalar": torch.tensor(4.0),
        "shared": torch.zeros(size + 1),
        "flag": True,
    }
    pieces = split_all([batch], parts)
    assert len(pieces) <= parts and all(piece.keys() == batch.keys() for piece in pieces)
    assert torch.equal(torch.cat([piece["x"] for piece in pieces]), batch["x"])
    assert torch.equal(torch.cat([piece["nest"]["y"] for piece in pieces]), rows)
    assert [word for piece in pieces for word in piece["words"]] == batch["words"]
    assert all(piece["scalar"] is batch["scalar"] and piece["flag"] is True for piece in pieces)
    assert all(len(piece["shared"]) == size + 1 for piece in pieces)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_pair_of_tensors_is_not_taken_for_two_rows(kind: type) -> None:
    x, y = torch.arange(4).reshape(2, 2), torch.arange(2)
    first, second = split_all([kind((x, y))], 2)
    assert type(first) is kind
    assert torch.equal(first[0], x[:1]) and torch.equal(second[1], y[1:])


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("shapes do not fit")) and not is_out_of_memory(ValueError("out of memory"))


# ---- what goes by samples -------------------------------------------------------------------------------------------


def looking_at(size: int) -> dict[str, Tensor]:
    """Text beside the patches of its images, of which there happen to be as many as samples."""
    return {
        "input_ids": torch.arange(size * 3).reshape(size, 3),
        "pixel_values": torch.zeros(size, 8),
        "image_grid_thw": torch.ones(1, 3, dtype=torch.long).expand(size, 3),
    }


def test_images_beside_text_are_not_cut_by_coincidence() -> None:
    with pytest.raises(CannotSplit, match="'pixel_values' has 4 rows"):
        BatchSplitter().split_all([looking_at(4)], 2)


def test_images_are_cut_where_each_sample_is_seen_to_have_one() -> None:
    batch = {"input_ids": torch.tensor([[9, 1, 2], [3, 9, 4]]), "pixel_values": torch.zeros(2, 3, 4, 4)}
    first, _ = BatchSplitter(image_token=9).split_all([batch], 2)
    assert first["pixel_values"].shape == (1, 3, 4, 4)
    two_and_none = {**batch, "input_ids": torch.tensor([[9, 1, 9], [3, 5, 4]])}
    assert BatchSplitter(image_token=9).why_whole(two_and_none) is not None


def test_a_batch_is_cut_by_samples_if_the_first_of_the_data_holds_nan() -> None:
    rows = torch.tensor([[float("nan"), 1.0], [2.0, 3.0]])
    batches = tuple({"x": rows[part], "labels": torch.zeros(len(rows[part]))} for part in ([0], [1], [0, 1]))
    splitter = BatchSplitter(two_samples=lambda: batches)
    assert splitter.why_whole({"x": torch.ones(2, 2), "labels": torch.ones(2)}) is None


def test_pictures_without_text_go_by_samples() -> None:
    batch = {"pixel_values": torch.zeros(4, 3, 2, 2), "labels": torch.zeros(4, dtype=torch.long)}
    assert [len(piece["pixel_values"]) for piece in split_all([batch], 2)] == [2, 2]


def test_class_weights_as_many_as_samples_are_told_from_weights_of_samples() -> None:
    """Their name leaves a doubt, which a batch of one sample or of another size ends."""
    batch = {"x": torch.zeros(3, 2), "weight": torch.arange(3.0)}
    assert BatchSplitter().why_whole(batch) is not None
    one, two = ({"x": torch.zeros(n, 2), "weight": torch.arange(3.0)} for n in (1, 2))
    shared = BatchSplitter(two_samples=lambda: (one, one, two))
    assert [len(piece["weight"]) for piece in shared.split_all([batch], 3)] == [3, 3, 3]
    one, other, both = ({"x": torch.zeros(len(w), 2), "weight": torch.tensor(w)} for w in ([1.0], [2.0], [1.0, 2.0]))
    own = BatchSplitter(two_samples=lambda: (one, other, both))
    assert [len(piece["weight"]) for piece in own.split_all([batch], 3)] == [1, 1, 1]


@pytest.mark.parametrize(
    "entry",
    [
        {"cu_seq_lens_q": torch.tensor([0, 3, 6])},
        {"position_ids": torch.zeros(3, 3, 4)},
        {"relations": torch.zeros(3, 3)},
        {"pixel_values": torch.zeros(24, 8)},
        {"labels": torch.zeros(12, dtype=torch.long)},
    ],
    ids=lambda entry: next(iter(entry)),
)
def test_what_may_belong_to_all_samples_keeps_the_batch_whole(entry: dict[str, Tensor]) -> None:
    assert BatchSplitter().why_whole({"input_ids": torch.zeros(3, 4, dtype=torch.long), **entry}) is not None


def test_an_entry_whose_length_changes_with_the_data_keeps_the_batch_whole() -> None:
    splitter = BatchSplitter()
    splitter.see({"x": torch.zeros(4, 2), "nodes": torch.zeros(9, 2)})
    assert splitter.why_whole({"x": torch.zeros(3, 2), "nodes": torch.zeros(3, 2)}) is not None


def test_a_batch_that_cannot_be_cut_is_the_original_error_with_a_word(tmp_path: Any) -> None:
    class Watching(Tokens):
        def forward(self, input_ids: Tensor, pixel_values: Any = None, labels: Any = None) -> Any:  # type: ignore[override]
            return super().forward(input_ids, None, labels)

    def collate(features: Any) -> Any:
        batch = models.pad(features)
        patches = sum(len(each["input_ids"]) for each in features)
        return {"input_ids": batch["input_ids"], "labels": batch["labels"], "pixel_values": torch.zeros(patches, 2)}

    trainer = trainer_of(limited(made(Watching), 3), samples(), tmp_path, collator=collate, **RUN)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert [text for text in trainer._loopwright.notices.told if "cannot be split" in text and "pixel_values" in text]


@pytest.mark.parametrize("most", [2, 3, 6])
def test_a_mean_over_sequences_is_the_same_in_smaller_parts(most: int, tmp_path: Any) -> None:
    class Sequences(Tokens):
        def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
            loss = nn.functional.cross_entropy(self.logits(input_ids).transpose(1, 2), labels, reduction="none")
            return {"loss": (loss.sum(-1) / (labels != -100).sum(-1)).mean()}

    assert_same_run(*both(made(Sequences), most, tmp_path))


@pytest.mark.parametrize(
    "made", [lambda width: {"query": torch.ones(1, width)}, lambda width: [torch.ones(1, width)], lambda w: np.ones(w)]
)
@pytest.mark.parametrize("widths", [(2, 2), (2, 3), (1, 1)])
def test_batches_with_tensors_in_containers_are_not_joined(made: Any, widths: tuple[int, int]) -> None:
    """Comparing the containers would raise, or keep the rows of one batch only."""
    batches = [{"x": torch.ones(1, 2), "nested": made(width), "names": ["a"]} for width in widths]
    assert BatchSplitter().join(batches, may_ignore=True) is None
    for batch in batches:
        batch["nested"] = {"of": ("text", [1])}
    assert BatchSplitter().join(batches, may_ignore=True)["names"] == ["a"]

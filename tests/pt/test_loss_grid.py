"""Gradients of an update do not depend on how its samples are split into micro-batches: equal to 1e-10 in fp64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import loopwright
from loopwright.pt.loss.targets import LossKind, count_targets
from tests import models
from tests.models import (
    ShiftedTokens,
    SilentTokens,
    Tokens,
    assert_close,
    gradients_from,
    made,
    pad,
    pad_wide,
    samples,
    summed,
    trained_gradients,
    trainer_of,
)
from tests.spreads import spread

pytestmark = pytest.mark.usefixtures("doubles_stay")


SPLITS = [(7, 1), (1, 7), (2, 4), (3, 3)]
"""Micro-batch size and accumulation: one update over all seven samples."""


def plain(shift: bool = False, smoothing: float = 0.0) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    """The loss over all targets of a batch, by hand, from the logits alone."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.get("labels")
        extra = {"labels": labels} if getattr(getattr(model, "config", None), "is_encoder_decoder", False) else {}
        outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **extra)
        total, count = summed(outputs["logits"], labels, shift=shift, smoothing=smoothing)
        return total / count

    return loss


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "plain": (lambda: made(Tokens), False),
    "plain with its own shift": (lambda: made(ShiftedTokens), True),
    "llama": (models.llama, True),
    "gpt2": (models.gpt2, True),
    "bert tokens": (models.bert_tokens, False),
    "bert classes": (models.bert_classes, False),
    "t5": (models.t5, False),
}


@functools.cache
def case(name: str) -> tuple[nn.Module, list[dict[str, Tensor]], dict[str, Tensor]]:
    """A model, its samples, and the gradient of all of them by hand."""
    make, shift = MODELS[name]
    model, data = make(), samples(classes=name == "bert classes")
    return model, data, gradients_from(model, lambda model: plain(shift)(model, pad(data)))


@pytest.mark.parametrize(("name", "split"), spread(MODELS, SPLITS), ids=str)
def test_a_models_own_loss(name: str, split: tuple[int, int], tmp_path: Any) -> None:
    model, data, expected = case(name)
    for collator in (pad, pad_wide):
        options = {"per_device_train_batch_size": split[0], "gradient_accumulation_steps": split[1]}
        [gradients] = trained_gradients(model, data, tmp_path, collator=collator, **options)
        assert_close(gradients, expected)


# ---- losses of the user's own ---------------------------------------------------------------------------------------


def mean_of(outputs: Any, labels: Tensor) -> Tensor:
    total, count = summed(outputs["logits"], labels)
    return total / count


class TwoArguments(loopwright.Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        labels = inputs.pop("labels")
        return mean_of(model(**inputs), labels)


class UsesItems(loopwright.Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = summed(outputs["logits"], labels)[0] / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class IgnoresItems(loopwright.Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = mean_of(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class TakesAnything(loopwright.Trainer):
    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = mean_of(outputs, labels)
        return (loss, outputs) if kwargs.get("return_outputs") else loss


class Pair(loopwright.Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        labels = inputs.pop("labels")
        return summed(model(**inputs)["logits"], labels)


class CallsSuper(loopwright.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


def three_arguments(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    total, count = summed(outputs["logits"], labels)
    return total / (count if num_items_in_batch is None else num_items_in_batch)


LOSSES: dict[str, dict[str, Any]] = {
    "override of two arguments": {"cls": TwoArguments},
    "override that divides by the items": {"cls": UsesItems},
    "override that ignores the items": {"cls": IgnoresItems},
    "override of anything": {"cls": TakesAnything},
    "override that gives sum and count": {"cls": Pair},
    "override that calls super": {"cls": CallsSuper},
    "function of two arguments": {"compute_loss_func": mean_of},
    "function of three arguments": {"compute_loss_func": three_arguments},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_users_loss(name: str, tmp_path: Any) -> None:
    model, data, expected = case("plain")
    if name == "label smoothing":
        expected = gradients_from(model, lambda model: plain(smoothing=0.1)(model, pad(data)))
    for size, accumulation in SPLITS:
        for collator in (pad, pad_wide):
            options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
            [gradients] = trained_gradients(model, data, tmp_path, collator=collator, **options, **LOSSES[name])
            assert_close(gradients, expected)


@pytest.mark.parametrize(("split", "name"), spread(SPLITS, ["llama", "t5", "bert classes"]), ids=str)
def test_smoothing_has_one_denominator(name: str, split: tuple[int, int], tmp_path: Any) -> None:
    model, data, _ = case(name)
    shift = MODELS[name][1]
    expected = gradients_from(model, lambda model: plain(shift, smoothing=0.1)(model, pad(data)))
    options = {"per_device_train_batch_size": split[0], "gradient_accumulation_steps": split[1]}
    [gradients] = trained_gradients(model, data, tmp_path, label_smoothing_factor=0.1, **options)
    assert_close(gradients, expected)


@pytest.mark.parametrize(
    "name", ["plain", "plain with its own shift", "llama", "gpt2", "bert tokens", "bert classes", "t5"]
)
def test_smoothing_by_nothing_is_the_plain_loss(name: str, tmp_path: Any) -> None:
    model, data, expected = case(name)
    [gradients] = trained_gradients(
        model,
        data,
        tmp_path,
        label_smoothing_factor=1e-13,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
    )
    assert_close(gradients, expected)


# ---- denominators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shifted"), [(name, shift) for name, (_, shift) in MODELS.items()])
def test_items_are_the_targets_the_loss_uses(name: str, shifted: bool, tmp_path: Any) -> None:
    model, data, _ = case(name)
    trainer = trainer_of(
        model, data, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1
    )
    trainer.train()
    labels = [pad(data[i : i + 2])["labels"] for i in range(0, 7, 2)]
    counted = [rows[:, 1:] if shifted else rows for rows in labels]
    expected = sum(int((rows != -100).sum()) for rows in counted)
    assert trainer._get_num_items_in_batch([{"labels": rows} for rows in labels], None) == expected


def test_rows_that_start_with_ignored_targets_do_not_hide_the_shift(tmp_path: Any) -> None:
    """The first update cannot show whether the first target counts; a later one does."""
    model = made(ShiftedTokens)
    data = [*samples((6, 9), ignored=1), *samples((4, 12))]
    gradients = trained_gradients(model, data, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    for found, part in zip(gradients, (data[:2], data[2:]), strict=True):
        assert_close(found, gradients_from(model, lambda model, part=part: plain(shift=True)(model, pad(part))))


def test_a_loss_that_cannot_take_ignored_targets_is_never_given_any(tmp_path: Any) -> None:
    def picks(outputs: Any, labels: Tensor) -> Tensor:
        assert bool((labels >= 0).all())
        return -outputs["logits"].log_softmax(-1).gather(-1, labels.unsqueeze(-1)).mean()

    model, data = made(Tokens), samples((6, 6, 6, 6))
    options = {"compute_loss_func": picks, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    [gradients] = trained_gradients(model, data, tmp_path, **options)
    assert_close(gradients, gradients_from(model, lambda model: plain()(model, pad(data))))


def test_padded_and_flattened_batches_are_one(tmp_path: Any) -> None:
    """Sequences end to end, the first target of each ignored, learn what the padded ones learn."""

    def flatten(features: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        labels = [torch.cat([torch.tensor([-100]), each["labels"][1:]]) for each in features]
        position = torch.cat([torch.arange(len(each["labels"])) for each in features])
        ids = torch.cat([each["input_ids"] for each in features])
        return {"input_ids": ids[None], "labels": torch.cat(labels)[None], "position_ids": position[None]}

    model, data, expected = case("llama")
    for size, accumulation in SPLITS:
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        [gradients] = trained_gradients(model, data, tmp_path, collator=flatten, **options)
        assert_close(gradients, expected)


def test_a_row_of_a_flattened_batch_does_not_see_its_neighbour() -> None:
    model = models.llama().eval()
    first, second = samples((6, 9))
    position = torch.cat([torch.arange(6), torch.arange(9)])[None]

    def logits(ids: Tensor) -> Tensor:
        ids = torch.cat([ids, second["input_ids"]])[None]
        return model(input_ids=ids, position_ids=position, use_cache=False).logits[0, 6:]

    with torch.no_grad():
        assert torch.equal(logits(first["input_ids"]), logits(first["input_ids"].flip(0)))


@pytest.mark.parametrize(("empty", "name"), spread([0, 1, 3], ["plain", "llama", "bert tokens"]))
def test_a_micro_batch_without_targets_adds_nothing(name: str, empty: int, tmp_path: Any) -> None:
    model, _, _ = case(name)
    shift = MODELS[name][1]
    data = samples((5, 8, 3, 9))
    data[empty] = {**data[empty], "labels": torch.full_like(data[empty]["labels"], -100)}
    expected = gradients_from(model, lambda model: plain(shift)(model, pad(data)))
    with torch.no_grad():
        loss = float(plain(shift)(model, pad(data)))
    for cls in (loopwright.Trainer, *((UsesItems, TwoArguments, Pair) if name == "plain" else ())):
        options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "cls": cls}
        [gradients] = trained_gradients(model, data, tmp_path, **options)
        assert_close(gradients, expected)
        trainer = trainer_of(model, data, tmp_path, max_steps=1, **options)
        assert trainer.train().training_loss == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("cls", [loopwright.Trainer, UsesItems, Pair])
def test_an_update_without_targets_leaves_the_weights_alone(cls: type, tmp_path: Any) -> None:
    data = [{**each, "labels": torch.full_like(each["labels"], -100)} for each in samples((5, 8))] + samples((4, 6))
    trainer = trainer_of(
        made(Tokens), data, tmp_path, cls=cls, per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=2
    )
    trainer.train()
    model = made(Tokens)
    loss = plain()(model, pad(data[2:]))
    loss.backward()
    for mine, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs - 0.1 * theirs.grad, rtol=0, atol=1e-10)


def test_the_epoch_counts_micro_batches_that_were_left_out(tmp_path: Any) -> None:
    data = samples((5, 8, 3, 9))
    data[1] = {**data[1], "labels": torch.full_like(data[1]["labels"], -100)}
    trainer = trainer_of(
        made(Tokens), data, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2, num_train_epochs=2
    )
    trainer.train()
    assert trainer.state.epoch == 2.0 and trainer.state.global_step == 4


# ---- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "plain with its own shift", "llama", "bert classes"])
def test_a_short_last_window_is_a_whole_update(name: str, tmp_path: Any) -> None:
    """Seven micro-batches, four at a time: two updates, the second over three."""
    model, data, _ = case(name)
    shift = MODELS[name][1]
    gradients = trained_gradients(model, data, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert len(gradients) == 2
    for found, part in zip(gradients, (data[:4], data[4:]), strict=True):
        assert_close(found, gradients_from(model, lambda model, part=part: plain(shift)(model, pad(part))))


def test_gradients_do_not_leak_into_the_next_epoch(tmp_path: Any) -> None:
    model, data, _ = case("plain")
    gradients = trained_gradients(
        model, data, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, num_train_epochs=2
    )
    assert len(gradients) == 4
    for first, second in zip(gradients[:2], gradients[2:], strict=True):
        assert_close(second, first, tolerance=0.0)


class Line(nn.Module):
    """The cheapest thing that trains; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.seen: list[int] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if torch.is_grad_enabled():
            self.seen += [int(each) for each in x]
        return {"loss": ((self.w * x - labels) ** 2).mean()}


def line_data(n: int) -> list[dict[str, float]]:
    return [{"x": float(i), "labels": 1.0} for i in range(n)]


@given(
    n=st.integers(1, 9),
    size=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    epochs=st.sampled_from([1, 2, 0.5, 1.5]),
    drop=st.booleans(),
)
@settings(max_examples=40)
def test_updates_and_samples_are_the_closed_form(
    n: int, size: int, accumulation: int, epochs: float, drop: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    batches = n // size if drop else -(-n // size)
    if not batches:
        return
    trainer = trainer_of(
        Line(), line_data(n), tmp_path_factory.mktemp("run"), collator=None, per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation, num_train_epochs=epochs, dataloader_drop_last=drop,
        learning_rate=1e-3,
    )  # fmt: skip
    trainer.train()
    per_epoch = -(-batches // accumulation)
    updates = -int(-epochs * per_epoch // 1)
    assert trainer.state.global_step == updates
    whole, rest = divmod(updates, per_epoch)
    one_epoch = min(batches * size, n)
    expected = whole * one_epoch + min(rest * accumulation * size, one_epoch)
    assert len(trainer.model.seen) == expected
    assert trainer.model.seen == [i % one_epoch for i in range(expected)]


# ---- logs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "interval"), spread([False, True], [1, 2, 3, 5, 100]))
def test_every_logged_loss_is_the_mean_since_the_last_one(interval: int, first: bool, tmp_path: Any) -> None:
    model, data, _ = case("plain")
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    every = trainer_of(model, data, tmp_path / "every", logging_steps=1, **options)
    every.train()
    losses = {row["step"]: row["loss"] for row in every.state.log_history if "loss" in row}
    trainer = trainer_of(model, data, tmp_path / "some", logging_steps=interval, logging_first_step=first, **options)
    result = trainer.train()
    before = 0
    for row in trainer.state.log_history:
        if "loss" in row:
            window = [losses[step] for step in range(before + 1, row["step"] + 1)]
            assert row["loss"] == pytest.approx(sum(window) / len(window), rel=1e-12)
            before = row["step"]
    logged = [row["step"] for row in trainer.state.log_history if "loss" in row]
    assert logged == [step for step in range(1, 9) if step % interval == 0 or (first and step == 1)]
    assert result.training_loss == pytest.approx(sum(losses.values()) / 8, rel=1e-12)


@pytest.mark.parametrize("name", ["plain", "plain with its own shift", "llama", "bert tokens", "bert classes", "t5"])
def test_logged_and_evaluated_losses_do_not_depend_on_the_batches(name: str, tmp_path: Any) -> None:
    model, data, _ = case(name)
    with torch.no_grad():
        expected = float(plain(MODELS[name][1])(model.train(), pad(data)))
    for size, accumulation in SPLITS:
        trainer = trainer_of(
            model, data, tmp_path, eval_dataset=data, learning_rate=0.0, num_train_epochs=1,
            per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, per_device_eval_batch_size=size,
        )  # fmt: skip
        assert trainer.train().training_loss == pytest.approx(expected, rel=1e-12)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_evaluated_losses_of_users_do_not_depend_on_the_batches(name: str, tmp_path: Any) -> None:
    model, data, _ = case("plain")
    smoothing = LOSSES[name].get("label_smoothing_factor", 0.0)
    with torch.no_grad():
        expected = float(plain(smoothing=smoothing)(model, pad(data)))
    for size in (1, 2, 5, 7):
        trainer = trainer_of(model, data, tmp_path, eval_dataset=data, per_device_eval_batch_size=size, **LOSSES[name])
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-12)


# ---- how a loss is scaled -------------------------------------------------------------------------------------------


KINDS = {
    "plain": LossKind.MEAN,
    "bert tokens": LossKind.MEAN,
    "bert classes": LossKind.MEAN,
    "t5": LossKind.MEAN,
    "llama": LossKind.SCALED,
    "gpt2": LossKind.SCALED,
}


@pytest.mark.parametrize("name", KINDS)
def test_whether_a_model_uses_the_items_is_found_out(name: str, tmp_path: Any) -> None:
    model, data, _ = case(name)
    trainer = trainer_of(
        model, data, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1
    )
    trainer.train()
    assert trainer._loopwright.run.accounting.kind is KINDS[name]
    assert trainer.model_accepts_loss_kwargs is (KINDS[name] is LossKind.SCALED)


def test_finding_out_changes_nothing(tmp_path: Any) -> None:
    """Random streams, running statistics and the user's batches are as if the loss had not been tried."""

    class Noisy(Tokens):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)

        def logits(self, input_ids: Tensor) -> Tensor:
            return self.head(self.drop(self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2)))

    model, data = made(Noisy), samples()
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 1}
    found = []
    for known in (None, False):
        cls = type("Says", (loopwright.Trainer,), {"loss_is_scaled_for_ga": known})
        trainer = trainer_of(model, data, tmp_path, cls=cls, **options)
        trainer.train()
        found.append(trainer.model.state_dict().values())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("scaled", [True, False])
def test_what_a_subclass_says_about_its_loss_is_believed(scaled: bool, tmp_path: Any) -> None:
    """Said to be scaled, a mean is added up as it is; said not to be, it is weighed by its targets."""

    class Says(IgnoresItems):
        loss_is_scaled_for_ga = scaled

    model, data, expected = case("plain")
    [gradients] = trained_gradients(
        model, data, tmp_path, cls=Says, per_device_train_batch_size=1, gradient_accumulation_steps=7
    )
    if scaled:
        total = plain()
        expected = gradients_from(model, lambda model: sum(total(model, pad([each])) for each in data))
    assert_close(gradients, expected)


def test_a_model_told_not_to_be_told_is_not_told(tmp_path: Any) -> None:
    model, data, expected = case("llama")
    told = []

    class Listening(type(model)):  # type: ignore[misc]
        accepts_loss_kwargs = False

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            told.append("num_items_in_batch" in kwargs)
            return super().forward(*args, **kwargs)

    listening = Listening(model.config).double()
    listening.load_state_dict(model.state_dict())
    [gradients] = trained_gradients(
        listening, data, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4,
        remove_unused_columns=False,
    )  # fmt: skip
    assert told and not any(told)
    assert_close(gradients, expected)


class Experts(Tokens):
    """A summed loss divided by the items, plus a term of its own that no item count divides."""

    weight = 0.02

    def forward(
        self, input_ids: Tensor, labels: Any = None, attention_mask: Any = None, num_items_in_batch: Any = None
    ):
        logits = self.logits(input_ids)
        total, count = summed(logits, labels)
        extra = (logits.logsumexp(-1) ** 2)[labels != -100].sum() / count
        return {"loss": total / (count if num_items_in_batch is None else num_items_in_batch) + self.weight * extra}


@pytest.mark.parametrize("weight", [0.5, 5e-5])
def test_a_part_of_the_loss_that_no_count_divides_is_weighed(weight: float, tmp_path: Any) -> None:
    model, data = made(Experts), samples()
    model.weight = weight
    expected = gradients_from(model, lambda model: model(pad(data)["input_ids"], pad(data)["labels"])["loss"])
    for size, accumulation in SPLITS:
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        watched = trainer_of(model, data, tmp_path, learning_rate=0.0, max_steps=1, **options)
        watched.train()
        assert accumulation == 1 or watched._loopwright.run.accounting.kind is LossKind.MIXED
        [gradients] = trained_gradients(model, data, tmp_path, **options)
        assert_close(gradients, expected)


@pytest.mark.parametrize("shift", [False, True])
def test_a_loss_that_starts_at_zero_is_still_weighed_right(shift: bool, tmp_path: Any) -> None:
    """A loss of zero says nothing about its scale or shift; nothing may be divided twice meanwhile."""

    def picky(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs["logits"]
        if shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        chosen = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        each = chosen.abs() * (labels > 3)
        return each.sum() / num_items_in_batch

    quiet = {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([0, 1, 2])}
    model, data = made(Tokens), [quiet, *samples((11, 101, 5, 7))]
    options = {"compute_loss_func": picky, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    gradients = trained_gradients(model, data, tmp_path, **options)
    # Until a batch can tell, the shift is a guess: the first update is exact only where that is right.
    for number, found in enumerate(gradients):
        batch = pad(data[2 * number : 2 * number + 2])
        count = (batch["labels"][:, 1 if shift else 0 :] != -100).sum()
        if number or not shift:
            loss = functools.partial(lambda model, b, n: picky(model(b["input_ids"]), b["labels"], n), b=batch, n=count)
            assert_close(found, gradients_from(model, loss))


def test_counts_of_every_kind_of_target() -> None:
    whole = torch.tensor([[5, -100, 2, 1], [-100, 3, -100, -100]])
    assert count_targets({"labels": whole}, [], shifted=False) == 4
    assert count_targets({"labels": whole}, [], shifted=True) == 3
    assert count_targets({"labels": whole, "shift_labels": whole}, [], shifted=True) == 4
    assert count_targets({"labels": torch.zeros(3, 2)}, [], shifted=True) == 6
    assert count_targets({"labels": torch.zeros(3, 2, dtype=torch.bool)}, [], shifted=False) == 6
    assert count_targets({"target": torch.tensor([1, -100])}, ["target"], shifted=True) == 1
    assert count_targets({"x": whole}, [], shifted=False) is None
    assert count_targets([whole], [], shifted=False) is None


def test_losses_without_labels_are_weighed_by_samples(tmp_path: Any) -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": ((self.w * x - 1) ** 2).mean()}

    data = [{"x": torch.tensor(float(i), dtype=torch.float64)} for i in range(7)]
    found = {}
    for size, accumulation in SPLITS:
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation, "collator": None}
        [gradients] = trained_gradients(Squares(), data, tmp_path, **options)
        found[size] = float(gradients["w"])
    assert all(value == pytest.approx(found[7], abs=1e-10) for value in found.values())


def test_silent_models_need_a_loss(tmp_path: Any) -> None:
    trainer = trainer_of(made(SilentTokens), samples(), tmp_path, max_steps=1)
    with pytest.raises(loopwright.ModelError, match="compute_loss_func"):
        trainer.train()


def test_a_loss_that_is_not_a_scalar_says_so(tmp_path: Any) -> None:
    trainer = trainer_of(
        made(Tokens), samples(), tmp_path, compute_loss_func=lambda outputs, labels: outputs["logits"], max_steps=1
    )
    with pytest.raises(loopwright.ModelError, match=r"must be a scalar, but its shape is \("):
        trainer.train()

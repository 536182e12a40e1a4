"""An update does not depend on how it is split, for every kind of loss; where that is impossible, it warns."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import loopwright
from loopwright.pt.loss.targets import LossKind
from tests import models
from tests.models import (
    Tokens,
    assert_close,
    gradients_from,
    made,
    pad,
    samples,
    summed,
    trained_gradients,
    trainer_of,
)
from tests.spreads import spread

LENGTHS = (11, 31, 5, 17, 3, 29, 8, 2)
SPLITS = [(8, 1), (4, 2), (2, 4), (1, 8), (3, 3)]
"""Micro-batch size and accumulation; the last one leaves a micro-batch of two."""
ALIKE = (6,) * 8

pytestmark = pytest.mark.usefixtures("doubles_stay")


def each_token(logits: Tensor, labels: Tensor, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """The cross entropy of every token, and which of them count."""
    loss = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=ignored, reduction="none")
    return loss, (labels != ignored).double()


def over_items(outputs: Any, labels: Tensor) -> Tensor:
    total, count = summed(outputs["logits"], labels)
    return total / count


def over_sequences(outputs: Any, labels: Tensor) -> Tensor:
    loss, counts = each_token(outputs["logits"], labels)
    return (loss.sum(-1) / counts.sum(-1)).mean()


def sums_of_sequences(outputs: Any, labels: Tensor) -> Tensor:
    return each_token(outputs["logits"], labels)[0].sum(-1).mean()


def a_sum(outputs: Any, labels: Tensor) -> Tensor:
    return summed(outputs["logits"], labels)[0]


def a_pair(outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    return summed(outputs["logits"], labels)


def scaled(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    total, count = summed(outputs["logits"], labels)
    return total / (count if num_items_in_batch is None else num_items_in_batch)


def ignoring_zero(outputs: Any, labels: Tensor) -> Tensor:
    """An own ignore_index, which pads the labels, too."""
    logits = outputs["logits"]
    return F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), ignore_index=0)


def smooth_l1_of_margins(outputs: Any, labels: Tensor) -> Tensor:
    """A ranking of each sequence against itself, as preference losses have it."""
    first, second = outputs["logits"][:, 0], outputs["logits"][:, 1]
    return -F.logsigmoid((first - second).mean(-1)).mean()


EXACT: dict[str, tuple[Callable[..., Any], LossKind]] = {
    "items": (over_items, LossKind.MEAN),
    "sequences": (over_sequences, LossKind.SAMPLES),
    "sums of sequences": (sums_of_sequences, LossKind.SAMPLES),
    "a sum": (a_sum, LossKind.TOTAL),
    "a pair": (a_pair, LossKind.SUM),
    "scaled": (scaled, LossKind.SCALED),
    "own ignore_index": (ignoring_zero, LossKind.MEAN),
    "preferences": (smooth_l1_of_margins, LossKind.SAMPLES),
}


def whole(loss: Callable[..., Any]) -> Callable[[nn.Module, Any], Tensor]:
    """The loss of everything at once, by hand."""

    def compute(model: nn.Module, data: Any) -> Tensor:
        batch = pad(data)
        found = loss(model(batch["input_ids"]), batch["labels"])
        return found[0] / found[1] if isinstance(found, tuple) else found

    return compute


@functools.cache
def data_of(lengths: tuple[int, ...]) -> list[dict[str, Tensor]]:
    return samples(lengths)


@pytest.mark.parametrize("lengths", [LENGTHS, pytest.param(ALIKE, marks=pytest.mark.grid)], ids=["ragged", "alike"])
@pytest.mark.parametrize("name", EXACT)
def test_an_update_is_that_of_one_batch(name: str, lengths: tuple[int, ...], tmp_path: Any) -> None:
    loss, kind = EXACT[name]
    model, data = made(Tokens), data_of(lengths)
    expected = gradients_from(model, lambda model: whole(loss)(model, data))
    for size, accumulation in SPLITS:
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        trainer = trainer_of(model, data, tmp_path, compute_loss_func=loss, learning_rate=0.0, max_steps=1, **options)
        trainer.train()
        if accumulation > 1 and lengths is LENGTHS:
            assert trainer._loopwright.run.accounting.kind is kind, (
                size,
                trainer.accounting.rivals,
                trainer.accounting.reason,
            )
            assert trainer._loopwright.run.accounting.is_additive
        [gradients] = trained_gradients(model, data, tmp_path, compute_loss_func=loss, **options)
        assert_close(gradients, expected)


@pytest.mark.parametrize("name", EXACT)
def test_an_evaluation_does_not_depend_on_its_batches(name: str, tmp_path: Any) -> None:
    loss, kind = EXACT[name]
    model, data = made(Tokens), data_of(LENGTHS)
    with torch.no_grad():
        expected = float(whole(loss)(model, data)) / (len(data) if kind is LossKind.TOTAL else 1)
    for size in (1, 2, 3, 4):
        trainer = trainer_of(model, data, tmp_path, eval_dataset=data, compute_loss_func=loss,
                             per_device_eval_batch_size=size)  # fmt: skip
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-10), size


@pytest.mark.parametrize("name", EXACT)
def test_what_comes_later_is_looked_at_too(name: str, tmp_path: Any) -> None:
    """Updates of equally long samples cannot tell samples from label tokens; the third one can."""
    loss, _ = EXACT[name]
    model, data = made(Tokens), [*data_of(ALIKE), *samples((9, 4, 21, 2))]
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    gradients = trained_gradients(model, data, tmp_path, compute_loss_func=loss, **options)
    for number, found in enumerate(gradients):
        part = data[4 * number : 4 * number + 4]
        assert_close(found, gradients_from(model, lambda model, part=part: whole(loss)(model, part)))


@pytest.mark.parametrize("split", [(2, 4), (1, 8)], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_what_the_first_micro_batches_do_not_tell_the_others_do(
    name: str, split: tuple[int, int], tmp_path: Any
) -> None:
    """Equally long samples at the beginning of an update, and others later in the same one."""
    loss, _ = EXACT[name]
    model, data = made(Tokens), [*data_of(ALIKE)[:4], *samples((9, 4, 21, 2))]
    options = {"per_device_train_batch_size": split[0], "gradient_accumulation_steps": split[1]}
    [gradients] = trained_gradients(model, data, tmp_path, compute_loss_func=loss, **options)
    assert_close(gradients, gradients_from(model, lambda model: whole(loss)(model, data)))


# ---- what fits nothing ----------------------------------------------------------------------------------------------


def class_weights(outputs: Any, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.2, 3.0, models.VOCAB, dtype=torch.float64)
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), weight=weight)


def contrastive(outputs: Any, labels: Tensor) -> Tensor:
    vectors = F.normalize(outputs["logits"].mean(1), dim=-1)
    return F.cross_entropy(vectors @ vectors.T / 0.1, torch.arange(len(vectors)))


def two_means(outputs: Any, labels: Tensor) -> Tensor:
    return over_items(outputs, labels) + over_sequences(outputs, labels)


def hardest(outputs: Any, labels: Tensor) -> Tensor:
    loss, counts = each_token(outputs["logits"], labels)
    return (loss.sum(-1) / counts.sum(-1)).topk(max(1, len(labels) // 2)).values.mean()


def balanced(outputs: Any, labels: Tensor) -> Tensor:
    """Its value is always 1, whatever the batch: only the gradient shows that batches differ."""
    loss = over_items(outputs, labels)
    return loss / loss.detach()


def scaled_contrastive(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return contrastive(outputs, labels) * len(labels) / (1 if num_items_in_batch is None else num_items_in_batch)


def paired_contrastive(outputs: Any, labels: Tensor) -> tuple[Tensor, int]:
    return contrastive(outputs, labels) * len(labels), len(labels)


ODD = [class_weights, contrastive, two_means, hardest, balanced, scaled_contrastive, paired_contrastive]


@pytest.mark.parametrize(
    ("loss", "split"), spread(ODD, [(4, 2), (2, 4), (3, 3)]), ids=lambda value: getattr(value, "__name__", str(value))
)
def test_what_is_made_of_no_parts_is_said(loss: Any, split: tuple[int, int], tmp_path: Any) -> None:
    trainer = trainer_of(
        made(Tokens), data_of(LENGTHS), tmp_path, compute_loss_func=loss, max_steps=1,
        per_device_train_batch_size=split[0], gradient_accumulation_steps=split[1],
    )  # fmt: skip
    trainer.train()
    told = [text for text in trainer._loopwright.notices.told if "depends on its split" in text]
    assert len(told) == 1 and "(sum, count)" in told[0]
    assert trainer._loopwright.run.accounting.is_additive is False and trainer._loopwright.run.accounting.reason


def eight_hardest(outputs: Any, labels: Tensor) -> Tensor:
    """A sum over samples, as long as there are no more than eight."""
    loss, _ = each_token(outputs["logits"].float(), labels)
    return loss.sum(-1).topk(min(8, len(labels))).values.sum()


@pytest.mark.parametrize("in_half", [True, False])
@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize(("loss", "kind"), [(eight_hardest, LossKind.OTHER), (over_items, LossKind.MEAN)])
def test_what_half_of_the_samples_show_must_hold_for_all(
    loss: Any, kind: LossKind, size: int, in_half: bool, tmp_path: Any
) -> None:
    data = data_of(tuple(2 + number % 5 for number in range(32)))
    trainer = trainer_of(
        made(Tokens).float(), data, tmp_path, compute_loss_func=loss, max_steps=1, bf16=in_half,
        per_device_train_batch_size=size, gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer.train()
    found = trainer._loopwright.run.accounting
    assert found.kind is kind and found.is_additive is (kind is LossKind.MEAN), found.reason


@pytest.mark.parametrize("in_half", [True, False])
@pytest.mark.parametrize("size", [8, 16])
def test_a_small_term_that_couples_a_whole_micro_batch_shows(size: int, in_half: bool, tmp_path: Any) -> None:
    """A hundredth of the loss, which half of the samples do not have, and half precision would round away."""

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        mean, first = over_items(outputs, labels), outputs["logits"].float()[:, 0]
        return mean + 0.02 * first.std(0).mean() if len(labels) >= size else mean

    trainer = trainer_of(
        made(Tokens).float(), data_of(tuple(2 + number % 5 for number in range(32))), tmp_path, compute_loss_func=loss,
        max_steps=1, bf16=in_half, per_device_train_batch_size=size, gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer.train()
    assert trainer._loopwright.run.accounting.is_additive is False


@pytest.mark.parametrize("loss", ODD, ids=lambda loss: loss.__name__)
def test_without_a_split_nothing_is_asked(loss: Any, tmp_path: Any) -> None:
    class Counted(Tokens):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            type(self).calls = getattr(type(self), "calls", 0) + 1
            return super().forward(*args, **kwargs)

    function = loss if loss is not scaled_contrastive else contrastive
    trainer = trainer_of(made(Counted), data_of(LENGTHS), tmp_path, compute_loss_func=function, max_steps=2,
                         per_device_train_batch_size=4, remove_unused_columns=False)  # fmt: skip
    trainer.train()
    assert Counted.calls == 2 and not [text for text in trainer._loopwright.notices.told if "loss" in text]


def test_evaluation_says_it_too(tmp_path: Any) -> None:
    data = data_of(LENGTHS)
    trainer = trainer_of(made(Tokens), data, tmp_path, eval_dataset=data, compute_loss_func=contrastive,
                         per_device_eval_batch_size=4)  # fmt: skip
    trainer.evaluate()
    trainer.evaluate()
    assert len([text for text in trainer._loopwright.notices.told if "eval_loss depends on" in text]) == 1


def test_a_loss_that_draws_numbers_is_not_called_odd(tmp_path: Any) -> None:
    class Noisy(Tokens):
        def logits(self, input_ids: Tensor) -> Tensor:
            logits = super().logits(input_ids)
            return logits + 0.1 * torch.randn_like(logits) if self.training else logits

    trainer = trainer_of(made(Noisy), data_of(LENGTHS), tmp_path, max_steps=1, per_device_train_batch_size=4,
                         gradient_accumulation_steps=2)  # fmt: skip
    trainer.train()
    accounting = trainer._loopwright.run.accounting
    assert accounting.kind is LossKind.MEAN and accounting.is_additive is False
    assert "random numbers" in accounting.reason


def test_a_model_with_some_weights_in_half_precision_rounds_like_them(tmp_path: Any) -> None:
    class Halved(Tokens):
        def logits(self, input_ids: Tensor) -> Tensor:
            hidden = self.embed(input_ids)
            return self.head(torch.tanh(self.mix(hidden.to(self.mix.weight.dtype))).to(hidden.dtype))

    model = made(Halved).float()
    model.mix.bfloat16()
    trainer = trainer_of(model, data_of(LENGTHS), tmp_path, max_steps=1, per_device_train_batch_size=4,
                         gradient_accumulation_steps=2)  # fmt: skip
    trainer.train()
    assert trainer._loopwright.run.accounting.kind is LossKind.MEAN


def test_sparse_gradients_are_compared(tmp_path: Any) -> None:
    model = made(Tokens)
    model.embed.sparse = True
    trainer = trainer_of(model, data_of(LENGTHS), tmp_path, compute_loss_func=over_sequences, max_steps=1,
                         per_device_train_batch_size=2, gradient_accumulation_steps=4)  # fmt: skip
    trainer.train()
    assert trainer._loopwright.run.accounting.kind is LossKind.SAMPLES
    assert trainer._loopwright.run.accounting.is_additive


def test_dropout_of_every_kind_is_no_randomness(tmp_path: Any) -> None:
    class Dropping(Tokens):
        def logits(self, input_ids: Tensor) -> Tensor:
            hidden = F.dropout(self.embed(input_ids), 0.3, self.training)[:, None]
            hidden = F.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=0.2)[:, 0]
            return self.head(nn.Dropout(0.3)(hidden)) if self.training else self.head(hidden)

    trainer = trainer_of(made(Dropping), data_of(ALIKE), tmp_path, max_steps=1, per_device_train_batch_size=4,
                         gradient_accumulation_steps=2)  # fmt: skip
    trainer.train()
    assert trainer._loopwright.run.accounting.kind is LossKind.MEAN and trainer._loopwright.run.accounting.is_additive


# ---- batches without items ------------------------------------------------------------------------------------------


def semi_supervised(outputs: Any, labels: Tensor) -> Tensor:
    """Cross entropy where there are labels, and flat predictions everywhere."""
    logits = outputs["logits"]
    flat = logits.log_softmax(-1).mean(-1).mean(-1).neg().mean()
    return flat if bool((labels == -100).all()) else over_items(outputs, labels) + flat


@pytest.mark.parametrize("at", [(1,), (3,), (0, 1), (4, 6), (7,)], ids=str)
def test_an_unlabeled_micro_batch_counts_where_its_loss_does(at: tuple[int, ...], tmp_path: Any) -> None:
    data = [dict(each) for each in samples((6,) * 8)]
    for index in at:
        data[index]["labels"] = torch.full_like(data[index]["labels"], -100)
    model = made(Tokens)
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    gradients = trained_gradients(model, data, tmp_path, compute_loss_func=semi_supervised, **options)
    for number, found in enumerate(gradients):

        def by_hand(model: nn.Module, number: int = number) -> Tensor:
            batches = [pad([each]) for each in data[2 * number : 2 * number + 2]]
            return sum(semi_supervised(model(b["input_ids"]), b["labels"]) for b in batches) / 2  # type: ignore[return-value]

        assert_close(found, gradients_from(model, by_hand))


def test_it_is_said_that_samples_weigh_from_there_on(tmp_path: Any) -> None:
    data = [dict(each) for each in samples((6,) * 8)]
    data[5]["labels"] = torch.full_like(data[5]["labels"], -100)
    trainer = trainer_of(made(Tokens), data, tmp_path, compute_loss_func=semi_supervised, num_train_epochs=1,
                         per_device_train_batch_size=1, gradient_accumulation_steps=2)  # fmt: skip
    trainer.train()
    assert len([text for text in trainer._loopwright.notices.told if "whose labels are all -100" in text]) == 1


# ---- losses that divide by the accumulation -------------------------------------------------------------------------


class ByArguments(loopwright.Trainer):
    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        return self.plain(model, inputs) / self.args.gradient_accumulation_steps

    def plain(self, model: Any, inputs: Any) -> Tensor:
        return over_items(model(inputs["input_ids"]), inputs["labels"])


class ByAccelerator(ByArguments):
    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        return self.plain(model, inputs) / self.accelerator.gradient_accumulation_steps


class ByProperty(ByArguments):
    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        return self.plain(model, inputs) / self.current_gradient_accumulation_steps


@pytest.mark.parametrize(("cls", "split"), spread([ByArguments, ByAccelerator, ByProperty], SPLITS))
def test_nothing_is_divided_by_the_accumulation_twice(cls: type, split: tuple[int, int], tmp_path: Any) -> None:
    model, data = made(Tokens), data_of(LENGTHS)
    expected = gradients_from(model, lambda model: whole(over_items)(model, data))
    options = {"per_device_train_batch_size": split[0], "gradient_accumulation_steps": split[1]}
    [gradients] = trained_gradients(model, data, tmp_path, cls=cls, **options)
    assert_close(gradients, expected)
    trainer = trainer_of(model, data, tmp_path, cls=cls, max_steps=1, **options)
    trainer.train()
    told = [text for text in trainer._loopwright.notices.told if "already divided" in text]
    divides = split[1] > 1 and cls is not ByAccelerator  # the accelerator's number is that of accelerate's: 1
    assert len(told) == divides and trainer.args.gradient_accumulation_steps == split[1]


# ---- losses that need gradients, fail, or draw data -----------------------------------------------------------------


class Attacked(loopwright.Trainer):
    """Adversarial training on the embeddings inside the loss, by torch.autograd.grad and by writing to weights."""

    way = "grad"

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        loss = over_items(model(inputs["input_ids"]), inputs["labels"])
        weight = model.embed.weight
        if self.way == "backward":
            loss.backward(retain_graph=True)
            step, weight.grad = weight.grad.clone(), None
            for parameter in model.parameters():
                parameter.grad = None
        else:
            [step] = torch.autograd.grad(loss, weight, retain_graph=True)
        backup = weight.data.clone()
        weight.data.add_(step.detach(), alpha=0.1)
        attacked = over_items(model(inputs["input_ids"]), inputs["labels"])
        if self.way == "breaks" and len(inputs["labels"]) == 1:
            raise ValueError("no step for one sample")
        weight.data.copy_(backup)
        return loss + attacked.detach() * 0


@pytest.mark.parametrize("way", ["grad", "backward", "breaks"])
@pytest.mark.parametrize("speed", ["off", "auto"])
def test_adversarial_losses_train(way: str, speed: str, tmp_path: Any) -> None:
    model, data = made(Tokens), data_of(LENGTHS)
    cls = type("Way", (Attacked,), {"way": way})
    trainer = trainer_of(model, data, tmp_path, cls=cls, max_steps=1, speed=speed, learning_rate=0.0,
                         per_device_train_batch_size=2, gradient_accumulation_steps=2)  # fmt: skip
    trainer.train()
    for mine, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs), "what a look at the loss wrote to the weights is still there"


def test_a_loss_that_cannot_be_tried_out_still_trains(tmp_path: Any) -> None:
    class Picky(loopwright.Trainer):
        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            if self._loopwright.is_probing:
                raise KeyError("nobody knows this batch")
            return over_items(model(inputs["input_ids"]), inputs["labels"])

    model, data = made(Tokens), data_of(LENGTHS)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "cls": Picky}
    [gradients] = trained_gradients(model, data, tmp_path, **options)
    assert_close(gradients, gradients_from(model, lambda model: whole(over_items)(model, data)))
    trainer = trainer_of(model, data, tmp_path, max_steps=1, **options)
    trainer.train()
    assert len([text for text in trainer._loopwright.notices.told if "could not be tested" in text]) == 1


def test_data_that_a_loss_draws_is_drawn_by_training_only(tmp_path: Any) -> None:
    class Draws(loopwright.Trainer):
        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            self.drawn = [*getattr(self, "drawn", []), next(self.source)]
            return over_items(model(inputs["input_ids"]), inputs["labels"])

    trainer = trainer_of(made(Tokens), data_of(LENGTHS), tmp_path, cls=Draws, max_steps=2,
                         per_device_train_batch_size=1, gradient_accumulation_steps=3)  # fmt: skip
    trainer.source = (i for i in range(100))
    trainer.train()
    assert trainer.drawn == list(range(6))
    assert [text for text in trainer._loopwright.notices.told if "'source' is an iterator" in text]


def test_data_that_a_loss_function_draws_is_drawn_by_training_only(tmp_path: Any) -> None:
    source, drawn = (i for i in range(100)), []

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        drawn.append(next(source))
        return over_items(outputs, labels)

    trainer = trainer_of(made(Tokens), data_of(LENGTHS), tmp_path, compute_loss_func=loss, max_steps=2,
                         per_device_train_batch_size=1, gradient_accumulation_steps=3)  # fmt: skip
    trainer.train()
    assert drawn == list(range(6))
    assert [text for text in trainer._loopwright.notices.told if "uses an iterator (generator)" in text]


# ---- models of transformers -----------------------------------------------------------------------------------------


def ctc(reduction: str = "sum") -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    return made(Wav2Vec2ForCTC, Wav2Vec2Config(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, conv_dim=(8, 8),
        conv_kernel=(4, 4), conv_stride=(4, 4), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0, attention_dropout=0.1, feat_proj_dropout=0.0, layerdrop=0.0, final_dropout=0.1,
        apply_spec_augment=False, feat_extract_norm="layer", ctc_zero_infinity=True,
        ctc_loss_reduction=reduction,
    ))  # fmt: skip


def sounds(lengths: tuple[int, ...] = (3, 5, 2, 4, 1, 3, 5, 2)) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        {
            "input_values": torch.randn(256, generator=g, dtype=torch.float64),
            "labels": F.pad(torch.randint(1, 8, (n,), generator=g), (0, 5 - n), value=-100),
        }
        for n in lengths
    ]


def segments() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    model = made(SegformerForSemanticSegmentation, SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[1, 1], hidden_sizes=[8, 8], patch_sizes=[3, 3], strides=[2, 2],
        num_attention_heads=[1, 1], mlp_ratios=[1, 1], decoder_hidden_size=8, num_labels=3, drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
    ))  # fmt: skip
    norm = model.decode_head.batch_norm
    model.decode_head.batch_norm = nn.Identity()  # it would couple the samples
    del norm
    return model


def pictures() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(2)
    made = []
    for number in range(8):
        labels = torch.randint(0, 3, (16, 16), generator=g)
        labels[: 2 * number] = 255
        made.append({"pixel_values": torch.randn(3, 16, 16, generator=g, dtype=torch.float64), "labels": labels})
    return made


REAL: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], LossKind]] = {
    "ctc": (ctc, sounds, LossKind.TOTAL),
    # The first samples have as many targets, so that they do not show what the mean is over.
    "ctc of means": (lambda: ctc("mean"), lambda: sounds((3, 3, 3, 3, 3, 3, 5, 1)), LossKind.SAMPLES),
    "segmentation": (segments, pictures, LossKind.MEAN),
}


@pytest.mark.parametrize("name", REAL)
def test_losses_of_transformers_that_are_no_mean_over_labels(name: str, tmp_path: Any) -> None:
    make, make_data, kind = REAL[name]
    model, data = make().eval(), make_data()
    batch = {key: torch.stack([each[key] for each in data]) for key in data[0]}
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.attention_dropout = 0.0
    for module in model.modules():
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    expected = gradients_from(model, lambda model: model(**batch).loss)
    for size, accumulation in [(8, 1), (4, 2), (3, 3), (1, 8)]:
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation, "collator": None}
        [gradients] = trained_gradients(model, data, tmp_path, **options)
        assert_close(gradients, expected)
    losses = []
    for size in (1, 3, 4):
        trainer = trainer_of(model, data, tmp_path, eval_dataset=data, per_device_eval_batch_size=size, collator=None)
        losses.append(trainer.evaluate()["eval_loss"])
        assert trainer._loopwright.loss.accounting_of_evaluation().kind is kind
    with torch.no_grad():
        by_hand = float(model.eval()(**batch).loss) / (len(data) if kind is LossKind.TOTAL else 1)
    # CTC is computed in single precision, whatever the model's is.
    assert losses == pytest.approx([by_hand] * 3, rel=1e-10 if name == "segmentation" else 1e-6)


def test_a_sum_of_two_means_is_said(tmp_path: Any) -> None:
    """BERT's pretraining: masked tokens and sentence pairs, each with a mean of its own."""
    from transformers import BertForPreTraining

    data = [
        {**each, "next_sentence_label": torch.tensor(i % 2)}
        for i, each in enumerate(samples((9, 4, 14, 6, 3, 11, 8, 5)))
    ]

    def collate(features: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        labels = torch.stack([each["next_sentence_label"] for each in features])
        return {**pad(features), "next_sentence_label": labels}

    trainer = trainer_of(made(BertForPreTraining, models.bert_config(2)), data, tmp_path, collator=collate, max_steps=1,
                         per_device_train_batch_size=4, gradient_accumulation_steps=2)  # fmt: skip
    trainer.train()
    assert trainer._loopwright.run.accounting.kind is LossKind.OTHER
    assert [text for text in trainer._loopwright.notices.told if "several means" in text]


def coupled(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **options: Any) -> Tensor:
    """Divided by the items, and with a term that compares samples."""
    total, count = summed(logits[:, :-1], labels[:, 1:])
    items = count if num_items_in_batch is None else num_items_in_batch
    return total / items + 0.1 * logits[:, 0].std(0, False).mean()


def without_module(function: types.FunctionType) -> types.FunctionType:
    """The same function as generated code has it: of no module."""
    made = types.FunctionType(function.__code__, function.__globals__, "made", function.__defaults__)
    made.__module__ = None  # type: ignore[assignment]
    return made


WAYS = ("registered by its kind", "in the place of the library's", "assigned to the model", "of generated code")


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_given_to_a_model_of_transformers_is_tested(
    way: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.loss.loss_utils import LOSS_MAPPING

    model = models.gpt2()
    if way == "assigned to the model":
        model.loss_function = coupled
    else:
        model.loss_type = "Coupled" if way.startswith("registered") else "ForCausalLM"
        given = without_module(coupled) if way == "of generated code" else coupled  # type: ignore[arg-type]
        monkeypatch.setitem(LOSS_MAPPING, model.loss_type, given)
    trainer = trainer_of(model, samples((9, 4, 14, 6)), tmp_path, max_steps=1, per_device_train_batch_size=2,
                         gradient_accumulation_steps=2)  # fmt: skip
    trainer.train()
    assert trainer._loopwright.run.accounting.is_additive is False
    assert [text for text in trainer._loopwright.notices.told if "depends on its split" in text]


# ---- going on -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sequences", "a sum", "own ignore_index", "items"])
def test_a_resumed_run_knows_the_loss(name: str, tmp_path: Any) -> None:
    """What was found out is not asked again, but checked when it is due; the weights are those of one long run."""
    loss, kind = EXACT[name]
    data = data_of(LENGTHS)
    options = {
        "compute_loss_func": loss, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "num_train_epochs": 2, "save_strategy": "epoch", "learning_rate": 1e-3,
    }  # fmt: skip
    through = trainer_of(made(Tokens), data, tmp_path, **options)
    through.train()
    again = trainer_of(made(Tokens), data, tmp_path, **options)
    looks: list[int] = []
    again._loopwright.loss.learn_loss = lambda batches, reports=True: looks.append(again.state.global_step + 1)  # type: ignore[method-assign]
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again._loopwright.run.accounting.kind is kind and looks == [4]
    for mine, theirs in zip(again.model.parameters(), through.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_another_loss_is_looked_at_anew(tmp_path: Any) -> None:
    data, options = data_of(LENGTHS), {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    first = trainer_of(made(Tokens), data, tmp_path, compute_loss_func=a_sum, max_steps=2, learning_rate=1e-3,
                       save_strategy="steps", save_steps=1, **options)  # fmt: skip
    first.train()
    again = trainer_of(made(Tokens), data, tmp_path, compute_loss_func=over_sequences, max_steps=3, learning_rate=1e-3,
                       **options)  # fmt: skip
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert again._loopwright.run.accounting.kind is LossKind.SAMPLES


# ---- labels and batches of evaluation -------------------------------------------------------------------------------


class TakesAnything(Tokens):
    """Names its ids only; labels come with whatever else there is."""

    def forward(self, input_ids: Tensor, **rest: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, labels=rest.get("labels"))


@pytest.mark.parametrize("removes", [True, False])
def test_a_forward_of_keywords_gets_its_labels(removes: bool, tmp_path: Any) -> None:
    model, data = made(TakesAnything), data_of(LENGTHS)
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "remove_unused_columns": removes}
    [gradients] = trained_gradients(model, data, tmp_path, **options)
    assert_close(gradients, gradients_from(model, lambda model: whole(over_items)(model, data)))


@pytest.mark.parametrize("drops", [True, False])
def test_evaluation_leaves_out_what_it_is_told_to(drops: bool, tmp_path: Any) -> None:
    data = data_of(LENGTHS)
    trainer = trainer_of(made(Tokens), data, tmp_path, eval_dataset=data, per_device_eval_batch_size=3,
                         dataloader_drop_last=drops)  # fmt: skip
    output = trainer.predict(data)
    kept = data[:6] if drops else data
    with torch.no_grad():
        expected = float(whole(over_items)(trainer.model, kept))
    assert len(output.predictions) == len(kept)
    assert output.metrics["test_loss"] == trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-10)

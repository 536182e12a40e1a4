"""Targets padded to a few widths: the same update, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright.speed.widening as widening
from loopwright import Trainer, TrainingArguments
from loopwright.speed.changed_batches import CannotChange
from loopwright.speed.cuda_graphs.contexts import draws_between, host_streams
from loopwright.speed.layouts.positions import most_positions
from loopwright.speed.proof.distance import HALF, half_tolerance
from loopwright.speed.proof.random_draws import draws_without_effect
from loopwright.speed.widening import WIDENED, WidenedUse, WidthChoice, widened

WIDTHS: list[int] = []
"""The width of the targets of every micro-batch that a model was called with."""


class Config:
    is_encoder_decoder = True
    max_target_positions = 256


class Speech(nn.Module):
    """Frames of one length in, tokens of many lengths out; `what` makes the loss depend on their width, or not."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.config, self.what = Config(), what
        self.frames, self.tokens, self.head = nn.Linear(4, 8), nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_features: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        WIDTHS.append(labels.shape[1])
        before = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1].clamp(min=0)], 1)
        heard = self.frames(input_features).mean(1, keepdim=True)
        if self.what == "reads the width":
            heard = heard * (1 + 1e-3 * labels.shape[1])
        logits = self.head(torch.tanh(self.tokens(before).cumsum(1) + heard))
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        count = labels.numel() if self.what == "mean over all places" else (labels != -100).sum()
        return {"loss": loss.sum() / count, "logits": logits}


def samples(count: int = 96) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(20, 61, (count,), generator=generator).tolist()
    return [
        {"input_features": torch.randn(6, 4, generator=generator, dtype=torch.float64),
         "labels": torch.randint(1, 11, (length,), generator=generator)} for length in lengths
    ]  # fmt: skip


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    labels = nn.utils.rnn.pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_features": torch.stack([row["input_features"] for row in rows]), "labels": labels}


def train(what: str, folder: Any, *, resume: Any = None, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6, "learning_rate": 1e-2,
        "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "speed": "max", **options,
    }  # fmt: skip
    model = Speech(what).double()
    trainer = Trainer(model, TrainingArguments(str(folder), **arguments), collate, train_dataset=samples())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def choice(trainer: Any) -> Any:
    return next(each for each in trainer._loopwright.run.speed.plan.choices if each.name == WIDENED)


def states_differ(a: Any, b: Any) -> float:
    mine, other = a.model.state_dict(), b.model.state_dict()
    return max(float((mine[name] - other[name]).abs().max()) for name in mine)


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widening, "WIDENING_DEVICES", ("cpu",))
    WIDTHS.clear()


def test_the_update_is_the_same(tmp_path: Any) -> None:
    plain = train("", tmp_path / "a", speed="off")
    assert len(set(WIDTHS)) > 3
    WIDTHS.clear()
    fast = train("", tmp_path / "b")
    assert choice(fast).is_on, choice(fast).reason
    assert set(WIDTHS[-4:]) == {64}
    assert states_differ(plain, fast) < 1e-12
    assert [row.get("loss") for row in fast.state.log_history] == pytest.approx(
        [row.get("loss") for row in plain.state.log_history]
    )


@pytest.mark.parametrize("what", ["reads the width", "mean over all places"])
def test_a_loss_that_depends_on_the_width_is_refused(what: str, tmp_path: Any) -> None:
    plain, fast = train(what, tmp_path / "a", speed="off"), train(what, tmp_path / "b")
    assert not choice(fast).is_on and "differs" in choice(fast).reason
    assert states_differ(plain, fast) == 0.0 and len(set(WIDTHS[-6:])) > 1


def test_a_model_that_changes_later_is_compared_again(tmp_path: Any) -> None:
    from loopwright import TrainerCallback

    class Changes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 4:
                model.what = "mean over all places"

    def run(speed: str) -> Any:
        model = Speech().double()
        args = TrainingArguments(
            str(tmp_path / speed), per_device_train_batch_size=4, max_steps=8, learning_rate=1e-2, use_cpu=True,
            disable_tqdm=True, report_to="none", save_strategy="no", speed=speed,
        )  # fmt: skip
        trainer = Trainer(model, args, collate, train_dataset=samples(), callbacks=[Changes()])
        trainer.train()
        return trainer

    assert states_differ(run("off"), run("max")) < 1e-12


def test_a_resumed_run_is_the_same_to_the_last_bit(tmp_path: Any) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    whole = train("", tmp_path, **options)
    rest = train("", tmp_path, resume=str(tmp_path / "checkpoint-3"), **options)
    assert rest._loopwright.run.speed.plan.widened and states_differ(whole, rest) == 0.0


def test_widths_stay_within_the_positions_of_the_model() -> None:
    row = {"input_features": torch.ones(2, 3), "labels": torch.ones(2, 70, dtype=torch.int64)}
    assert widened([row], 999)[0]["labels"].shape == (2, 128)
    assert widened([row], 100)[0]["labels"].shape == (2, 100)
    assert widened([row], 60)[0]["labels"].shape == (2, 70)
    assert int((widened([row], 999)[0]["labels"] == -100).sum()) == 2 * 58
    with pytest.raises(CannotChange, match="unknown"):
        widened([row], None)


def test_the_longest_target_is_that_of_the_decoder() -> None:
    class Both(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config, self.encoder, self.decoder = config, nn.Module(), nn.Module()
            self.encoder.embed_positions = nn.Embedding(1500, 2)

    class Text:
        max_position_embeddings = 77

    class Nested:
        decoder = Text()

    model = Both(Nested())
    assert most_positions(model) == 77, "in the configuration of the decoder"
    model.decoder.embed_positions = nn.Embedding(66, 2)
    assert most_positions(model) == 62, "in its table of positions, some of which may not be used"
    assert most_positions(nn.Module()) is None
    assert most_positions(Speech()) == 256


@pytest.mark.parametrize(
    "batch",
    [
        {"labels": torch.ones(2)},
        {"labels": torch.ones(2, 3)},
        {"input_features": torch.ones(2, 3)},
        {"labels": torch.ones(2, 3, dtype=torch.int64), "decoder_input_ids": torch.ones(2, 3, dtype=torch.int64)},
        [torch.ones(2)],
    ],
)
def test_other_batches_are_left_alone(batch: Any) -> None:
    with pytest.raises(CannotChange):
        widened([batch], 999)


def test_labels_with_another_padding_are_left_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that ignores another label may not know -100, which would abort the process on a GPU."""
    monkeypatch.setattr(WidenedUse, "prove", lambda *given: pytest.fail("a label that the model may not know"))

    def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = collate(rows)
        return {**batch, "labels": batch["labels"].clamp(min=0)}

    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6, use_cpu=True,
        disable_tqdm=True, report_to="none", save_strategy="no", speed="max",
    )  # fmt: skip
    trainer = Trainer(Speech().double(), args, padded, train_dataset=samples())
    trainer.train()
    assert not trainer._loopwright.run.speed.plan.widened and len(set(WIDTHS)) > 1


def test_one_width_needs_no_filling(tmp_path: Any) -> None:
    trainer = train("", tmp_path, max_steps=2, per_device_train_batch_size=1, gradient_accumulation_steps=1)
    setup = trainer._loopwright.acceleration.training_setup()
    chosen = WidthChoice(setup)
    batch = collate(samples(2))
    chosen.look([batch])
    assert chosen.choose(trainer._loopwright.run.speed.plan, [batch]) == [batch]


def test_numbers_drawn_without_effect_are_counted() -> None:
    device = torch.device("cuda")
    before = host_streams(device)
    for _ in range(24):
        torch.rand([])
    assert draws_between(before, host_streams(device)) == 24
    torch.set_rng_state(torch.frombuffer(bytearray(before.torch), dtype=torch.uint8))
    torch.rand(24)
    assert draws_between(before, host_streams(device)) == 24, "one call draws what 24 calls draw"
    torch.randn(3)
    assert draws_between(before, host_streams(device)) is None


def test_only_layerdrop_of_zero_draws_without_effect() -> None:
    class Stack(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.layerdrop, self.layers = rate, nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    assert draws_without_effect(nn.Sequential(Stack(0.0), Stack(0.0))) == 6
    assert draws_without_effect(nn.Sequential(Stack(0.0), Stack(0.1))) == 0
    assert draws_without_effect(nn.Linear(2, 2)) == 0


def test_gradients_may_differ_by_their_own_rounding() -> None:
    assert half_tolerance(0.0) == HALF and half_tolerance(0.03) == HALF
    assert half_tolerance(0.1).gradient == pytest.approx(0.15) and half_tolerance(0.1).loss == HALF.loss
    assert half_tolerance(5.0).gradient == pytest.approx(0.3) and half_tolerance(5.0).parameter <= 0.5

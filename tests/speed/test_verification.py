"""Later updates are computed both ways: often at first, then one in a few thousand."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from loopwright import TrainerCallback
from loopwright.speed.layouts.samples import take_apart
from loopwright.speed.planner.decision import COLLATED
from loopwright.speed.proof.audit import EVERY, Verification, is_turn
from loopwright.speed.proof.prover import Prover
from tests.speed.architectures import build, collate, samples
from tests.speed.training import InOrder, train

pytest.importorskip("transformers")
SWITCH = {"padding": False, "nan": False}
"""A global that the loss reads: no stamp of a model can see it."""


class Switched(nn.Module):
    """A model whose loss looks at padding, or is not finite, once a global says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("bert", "tokens")
        self.config = self.inner.config

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> dict[str, Any]:
        outputs = self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        loss = outputs.loss
        if SWITCH["padding"]:
            loss = loss + 0.1 * outputs.logits.square().mean()
        return {"loss": loss * float("nan") if SWITCH["nan"] else loss, "logits": outputs.logits}


class At(TrainerCallback):
    """Turns a switch on before one step, and off after it if it is to last no longer."""

    def __init__(self, switch: str, step: int, *, lasts: bool) -> None:
        self.switch, self.step, self.lasts = switch, step, lasts

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        SWITCH[self.switch] = state.global_step == self.step - 1 or (self.lasts and state.global_step >= self.step)


@pytest.fixture(autouse=True)
def _off() -> Any:
    yield
    SWITCH.update(dict.fromkeys(SWITCH, False))


def run(folder: Path, speed: str, *callbacks: TrainerCallback, steps: int = 10, **more: Any) -> Any:
    torch.manual_seed(0)
    SWITCH.update(dict.fromkeys(SWITCH, False))
    options: dict[str, Any] = {"gradient_accumulation_steps": 1, "max_steps": steps, "learning_rate": 0.01, **more}
    data = samples(6 * steps, "tokens")
    return train(Switched(), data, folder, kind=InOrder, speed=speed, given={"callbacks": list(callbacks)}, **options)


def test_turns_come_often_at_first() -> None:
    small = [update for update in range(1, 3 * EVERY + 1) if is_turn(update, is_small=True)]
    large = [update for update in range(1, 3 * EVERY + 1) if is_turn(update, is_small=False)]
    assert small == [*(2**k for k in range(1, 13)), 2 * EVERY, 3 * EVERY]
    assert large == [8, 1024, EVERY, 2 * EVERY, 3 * EVERY]


def test_the_report_counts_what_was_compared(tmp_path: Path) -> None:
    report = run(tmp_path, "max").trainer.speed_report()
    assert report.as_dict()["checks"]["computed both ways"] == 3  # the 2nd, 4th and 8th
    assert "computed both ways 3" in str(report)


def test_a_loss_that_changes_unseen_is_found_and_the_run_goes_on_right(tmp_path: Path) -> None:
    """From the sixth update on; the eighth is computed both ways."""
    plain = run(tmp_path / "plain", "off", At("padding", 6, lasts=True))
    fast = run(tmp_path / "fast", "max", At("padding", 6, lasts=True))
    assert fast.losses[:5] == pytest.approx(plain.losses[:5], rel=1e-6)
    assert fast.losses[5] != pytest.approx(plain.losses[5], rel=1e-6), "nothing can see a global"
    assert fast.plan.layout == COLLATED
    told = [text for text in fast.trainer._loopwright.notices.told if "step 8 since planning differs" in text]
    assert len(told) == 1 and "4 steps earlier" in told[0]


def test_an_update_without_a_finite_loss_is_no_difference(tmp_path: Path) -> None:
    """The fourth update is due to be computed both ways, and cannot be: the fifth is asked instead."""
    fast = run(tmp_path, "max", At("nan", 4, lasts=False), steps=6, on_nonfinite="skip")
    assert fast.plan.layout != COLLATED or not any("differs" in text for text in fast.trainer.notices.told)
    assert fast.trainer.speed_report().checks["computed both ways"] == 2


class LaterCoupled(InOrder):
    """A loss that compares the samples of a batch from the fifth update on."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss
        if self.state.global_step >= 4:
            loss = loss + outputs.logits[:, 0].std(0).mean()
        return (loss, outputs) if return_outputs else loss


def test_a_loss_that_couples_samples_later_says_which_steps_may_be_wrong(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = samples(12 * 9, "tokens", longest=16)
    found = train(build("bert", "tokens"), data, tmp_path, kind=LaterCoupled, speed="max", max_steps=9)
    told = [text for text in found.trainer._loopwright.notices.told if "from now on the collator's" in text]
    assert len(told) == 1 and "The last step that agreed was 3 steps earlier" in told[0]
    assert found.trainer._loopwright.run.speed is None


# ---- new lengths ----------------------------------------------------------------------------------------------------


class Beyond(nn.Module):
    """A model that looks at padding in batches wider than any that was compared."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.width = build("llama", "causal"), width
        self.config = self.inner.config

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **more: Any) -> dict[str, Any]:
        outputs = self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **more)
        is_wide = attention_mask is not None and input_ids.shape[1] > self.width
        loss = outputs.loss + 0.1 * outputs.logits.square().mean() if is_wide else outputs.loss
        return {"loss": loss, "logits": outputs.logits}


def with_a_long_sample(update: int, *, per_update: int, updates: int) -> list[dict[str, Any]]:
    """Samples of which one, in this update, is more than twice as long as all others; its row is not longer."""
    data = samples(per_update * updates, "causal", longest=12)
    longest = max(len(each["input_ids"]) for each in data)
    place = per_update * (update - 1)
    data[place] = {name: value.repeat(longest)[: 2 * longest + 4] for name, value in data[place].items()}
    for other in range(place + 1, place + per_update):
        data[other] = {name: value[:4] for name, value in data[other].items()}
    return data


@pytest.mark.parametrize("is_equal", [True, False])
def test_of_new_lengths_the_longest_sample_is_compared_and_not_the_update(
    is_equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[int] = []
    update = Prover.update

    def counted(self: Any, samples: Any, batches: Any, **more: Any) -> Any:
        whole.extend([1] if len(batches) > 1 else [])  # updates have two micro-batches
        return update(self, samples, batches, **more)

    monkeypatch.setattr(Prover, "update", counted)
    data = with_a_long_sample(3, per_update=12, updates=4)
    widest = max(len(each["input_ids"]) for each in data)
    found = {}
    for speed in ("max", "off"):
        torch.manual_seed(0)
        model = Beyond(1 << 20 if is_equal else widest - 1)
        found[speed] = train(model, data, tmp_path / speed, kind=InOrder, speed=speed, max_steps=4)
    checks = found["max"].trainer.speed_report().as_dict()["checks"]
    audits = checks["computed both ways"]
    assert checks["proved again"] == 1
    assert checks["with new inputs not laid out"] == (0 if is_equal else 1)
    assert len(whole) == 1 + audits if is_equal else len(whole) > 1 + audits
    assert found["max"].losses == pytest.approx(found["off"].losses, rel=1e-5)


class Within(Beyond):
    """A model that looks at padding in batches of one width, or of so many tokens."""

    def __init__(self, width: int | None = None, tokens: int | None = None) -> None:
        super().__init__(0)
        self.width, self.tokens = width, tokens

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **more: Any) -> dict[str, Any]:
        outputs = self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **more)
        is_met = input_ids.shape[1] == self.width or input_ids.numel() == self.tokens
        looks = attention_mask is not None and is_met
        loss = outputs.loss + 0.1 * outputs.logits.square().mean() if looks else outputs.loss
        return {"loss": loss, "logits": outputs.logits}


class Longest(Beyond):
    """A model that scales the embeddings of a batch by its longest sample, once that is long."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **more: Any) -> dict[str, Any]:
        positions = more.pop("position_ids", None)
        if positions is None:
            positions = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        embedded = self.inner.get_input_embeddings()(input_ids) * min(1.0, self.width / (int(positions.max()) + 1))
        more |= {"attention_mask": attention_mask, "labels": labels, "position_ids": positions}
        outputs = self.inner(inputs_embeds=embedded, **more)
        return {"loss": outputs.loss, "logits": outputs.logits}


def recomputing(recomputed: list[str]) -> Any:
    """In place of `Prover.sparing`, as on GPUs: recomputes where the model can, and notes each time."""

    def sparing(self: Any, plan: Any) -> Any:
        def recompute(stack: Any) -> None:
            recomputed.append(plan.layout)
            if "full" in self._setup.policies:
                stack.callback(self._setup.recompute("full"))

        return recompute

    return sparing


@pytest.mark.parametrize("is_equal", [True, False])
def test_of_lengths_that_were_made_before_the_loss_is_compared(
    is_equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In micro-batches of 27, samples of three times the longest are made with the plan."""
    counts = {"update": 0, "prove_loss": 0, "prove_lengths": 0}

    def counted(name: str) -> Any:
        method = getattr(Prover, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return method(*args, **kwargs)

        return call

    for name in counts:
        monkeypatch.setattr(Prover, name, counted(name))
    recomputed: list[str] = []
    monkeypatch.setattr(Prover, "sparing", recomputing(recomputed))
    data = with_a_long_sample(3, per_update=27, updates=4)
    longest = max(len(each["input_ids"]) for each in data)
    options = {"per_device_train_batch_size": 27, "gradient_accumulation_steps": 1, "max_steps": 3}
    found = {}
    for speed in ("max", "off"):
        torch.manual_seed(0)
        model = Within() if is_equal else Within(longest)
        found[speed] = train(model, data, tmp_path / speed, kind=InOrder, speed=speed, **options)
    checks = found["max"].trainer.speed_report().as_dict()["checks"]
    assert checks["proved again"] == 1 and counts["prove_loss"] == 1 and counts["prove_lengths"] == 1
    assert counts["update"] == (2 if is_equal else 3)  # with the plan, as the second update, and because it differed
    assert len(recomputed) == 3  # longer rows, and the loss both ways
    assert found["max"].losses == pytest.approx(found["off"].losses, rel=1e-6)


def test_if_samples_of_more_than_twice_the_longest_differ_twice_is_covered(tmp_path: Path) -> None:
    data = samples(27 * 2, "causal", longest=12)
    data[30] = {name: value.repeat(12)[:20] for name, value in data[30].items()}
    options = {"per_device_train_batch_size": 27, "gradient_accumulation_steps": 1, "max_steps": 2}
    found = train(Beyond(24), data, tmp_path, kind=InOrder, speed="max", **options)
    verification = found.trainer._loopwright.run.speed._verification
    assert verification.coverage.forms[0].stretched == {"source": 24} and verification.proofs == 0


@pytest.mark.parametrize("rows, reached", [(1, (21, 21)), (3, (64, 64)), (48, (1024, 256))])
def test_three_samples_take_about_the_memory_of_a_micro_batch(rows: int, reached: tuple[int, int]) -> None:
    batch = {name: torch.ones(rows, 64, dtype=torch.long) for name in ("input_ids", "attention_mask", "labels")}
    update = take_apart([batch], is_pair=False)
    eager = build("llama", "causal", attn_implementation="eager")
    for model, on_gpu, expected in (
        (build("llama", "causal"), True, reached[0]),
        (build("llama", "causal"), False, reached[1]),
        (eager, True, reached[1]),
        (build("t5", "pair"), True, reached[1]),
    ):
        prover = Prover.__new__(Prover)
        prover._setup = cast(Any, SimpleNamespace(model=model, on_gpu=on_gpu))
        assert prover._reached([batch], update) == expected


def test_of_pairs_a_source_may_be_new_and_a_target_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample with the new source has a short target, and stretched it is shorter than one that was compared."""
    covers: list[bool] = []
    prove = Verification.prove

    def recorded(self: Any, *args: Any, **options: Any) -> Any:
        covers.append(options["covers"])
        return prove(self, *args, **options)

    monkeypatch.setattr(Verification, "prove", recorded)
    usual, long = [(16, 2), (3, 12), (2, 2), (5, 3), (4, 2), (6, 2)], [(40, 2), (3, 12), (2, 2), (5, 3), (4, 2), (6, 2)]
    ids = torch.arange(40) % 50 + 5
    data = [{"input_ids": ids[:source], "labels": ids[:target]} for source, target in usual + long]
    options = {"per_device_train_batch_size": 3, "max_steps": 2}
    found = train(build("t5", "pair"), data, tmp_path, kind=InOrder, speed="max", **options)
    assert found.plan.layout == "flat pairs"
    assert found.trainer.speed_report().as_dict()["checks"]["proved again"] == 1 and True not in covers


@pytest.mark.parametrize("kind", ["width", "tokens", "longest"])
def test_of_new_lengths_the_real_micro_batch_is_compared_too(kind: str, tmp_path: Path) -> None:
    """A stretched sample has another length, three samples have fewer tokens, and two of them may have no targets."""
    data = with_a_long_sample(3, per_update=12, updates=4)
    lengths = [len(each["input_ids"]) for each in data]
    models = {"width": Within(max(lengths)), "tokens": Within(tokens=12 * max(lengths)), "longest": Longest(14)}
    options = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1} if kind == "tokens" else {}
    if kind == "longest":
        order = sorted(range(24, 36), key=lambda place: lengths[place])
        for place in (order[0], order[6]):  # the shortest one and a usual one
            data[place] = {**data[place], "labels": torch.full_like(data[place]["labels"], -100)}
    found = {}
    for speed in ("max", "off"):
        torch.manual_seed(0)
        model = copy.deepcopy(models[kind])
        found[speed] = train(model, data, tmp_path / speed, kind=InOrder, speed=speed, max_steps=4, **options)
    assert found["max"].plan.layout == "flat"
    assert found["max"].losses == pytest.approx(found["off"].losses, rel=1e-5)


# ---- targets at other places ---------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A causal model with a loss of its own; the first updates have no targets at the beginning of samples."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = build("llama", "causal"), kind
        self.config = self.inner.config

    def forward(self, input_ids: Any, labels: Any, loss_mask: Any = None, **more: Any) -> dict[str, Any]:
        logits = self.inner(input_ids=input_ids, **more).logits
        ahead = 2 if self.kind == "second next" else 1
        targets = labels[:, ahead:]
        losses = nn.functional.cross_entropy(logits[:, :-ahead].transpose(1, 2), targets, reduction="none")
        if self.kind == "mask":
            counted = loss_mask[:, 1:].to(losses.dtype)
            return {"loss": (losses * counted).sum() / counted.sum()}
        counted = (targets != -100).sum(1)
        if self.kind == "sequences":
            return {"loss": (losses.sum(1) / counted.clamp(min=1))[counted > 0].mean()}
        return {"loss": losses.sum() / counted.sum()}


@pytest.mark.parametrize("kind", ["mask", "second next", "sequences"])
def test_targets_at_places_that_were_not_compared_are_compared(kind: str, tmp_path: Path) -> None:
    """In the fifth of six updates a sample has targets from its beginning, or none; the eighth is the next audit."""
    data = samples(12 * 6, "causal", longest=16)
    lengths = [len(each["input_ids"]) for each in data]
    data = [data[place] for place in range(len(data)) if lengths[place] > 6]
    data = (2 * data)[: 12 * 6]
    changed = range(12 * 4, 12 * 5, 3)

    def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collate([{name: row[name] for name in ("input_ids", "labels")} for row in rows])
        is_changed = torch.tensor([row["place"] in changed for row in rows])[:, None]
        first = torch.where(is_changed, {"mask": 0, "second next": 1, "sequences": 99}[kind], 4)
        counts = (torch.arange(batch["labels"].shape[1]) >= first) & (batch["attention_mask"] == 1)
        if kind == "mask":
            return {**batch, "loss_mask": counts.long()}
        return {**batch, "labels": batch["labels"].masked_fill(~counts, -100)}

    rows = [{**each, "place": place} for place, each in enumerate(data)]
    found = {}
    for speed in ("max", "off"):
        torch.manual_seed(0)
        options = {"data_collator": collated, "remove_unused_columns": False, "max_steps": 6}
        found[speed] = train(Counting(kind), rows, tmp_path / speed, kind=InOrder, speed=speed, **options)
    assert found["max"].shapes[0] != found["off"].shapes[0] and found["max"].shapes[4] == found["off"].shapes[4]
    assert found["max"].losses == pytest.approx(found["off"].losses, rel=1e-6)


@pytest.mark.parametrize("was_made", [False, True])
def test_of_new_lengths_activations_are_recomputed_where_memory_is_scarce(
    was_made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recomputed: list[str] = []
    monkeypatch.setattr(Prover, "sparing", recomputing(recomputed))
    # In micro-batches of 27, samples of three times the longest are made with the plan.
    rows, parts = (27, 1) if was_made else (6, 2)
    options = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": parts, "max_steps": 6}
    data = with_a_long_sample(3, per_update=rows * parts, updates=6)
    found = {}
    for speed in ("max", "off"):
        torch.manual_seed(0)
        model = build("llama", "causal")
        found[speed] = train(model, data, tmp_path / speed, kind=InOrder, speed=speed, **options)
        assert not model.is_gradient_checkpointing
    checks = found["max"].trainer.speed_report().as_dict()["checks"]
    assert checks["laid out"] == 6 and checks["proved again"] == 1
    assert len(recomputed) == (3 if was_made else 2)  # longer rows; the new lengths as written, or the loss both ways
    assert "chosen again" not in caplog.text and "have changed" not in caplog.text
    assert found["max"].losses == pytest.approx(found["off"].losses, rel=1e-6)

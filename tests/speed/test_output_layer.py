"""The output layer with a padded number of classes, and the fused loss in graphs: the same training, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import loopwright.speed.output_layer as output_layer
import loopwright.speed.planner.heads as heads
from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.pt.acceleration import Acceleration
from loopwright.speed.fused_loss.cross_entropy import ALIGNED
from loopwright.speed.fused_loss.lazy_logits import HEAD
from loopwright.speed.output_layer import PADDED, PaddedHead, padded_classes, padded_linear
from loopwright.speed.planner.decision import IN_GROUPS
from tests.speed.architectures import VOCABULARY, build, samples as pairs
from tests.speed.training import train as train_pairs

CLASSES, WIDTH, TOKENS = 13, 8, 9


class Replay:
    """Records nothing: a replay is another run on the same tensors."""

    replays = 0

    def __call__(self, function: Any) -> Any:
        loss = torch.zeros((), dtype=torch.float64)

        def replay() -> None:
            self.replays += 1
            loss.copy_(function())

        return replay, loss


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Replay:
    recorder = Replay()
    monkeypatch.setattr(Acceleration, "graph_recorder", recorder)
    monkeypatch.setattr(heads, "HEAD_DEVICES", ("cpu",))
    monkeypatch.setitem(ALIGNED, "cpu", 8)
    return recorder


# ---- the product ----------------------------------------------------------------------------------------------------


def parts(bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Linear]:
    torch.manual_seed(1)
    hidden = torch.randn(2, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    return hidden, nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)


def gradients(logits: Tensor, hidden: Tensor, head: nn.Linear) -> list[Tensor]:
    targets = torch.arange(2 * TOKENS) % CLASSES
    loss = F.cross_entropy(logits.view(-1, CLASSES), targets)
    return [loss, *torch.autograd.grad(loss, [hidden, *head.parameters()], create_graph=True)]


@pytest.mark.parametrize("bias", [False, True])
def test_logits_and_gradients_are_those_of_the_layer(bias: bool) -> None:
    hidden, head = parts(bias)
    expected, found = head(hidden), padded_linear(hidden, head.weight, head.bias, 16)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    both = zip(gradients(found, hidden, head), gradients(expected, hidden, head), strict=True)
    for mine, other in both:
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-15)
        again = [torch.autograd.grad(each.square().sum(), hidden, retain_graph=True)[0] for each in (mine, other)]
        torch.testing.assert_close(*again, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("bias", [False, True])
def test_under_autocast_values_and_dtypes_are_those_of_the_layer(bias: bool) -> None:
    hidden, head = parts(bias, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = head(hidden), padded_linear(hidden, head.weight, head.bias, 16)
        assert found.dtype == expected.dtype == torch.bfloat16
        both = zip(gradients(found, hidden, head), gradients(expected, hidden, head), strict=True)
    for mine, other in both:
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=1e-3)


class Products(TorchDispatchMode):
    """Collects the sizes of rows in memory of all matrices that are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            matrices = [each for each in (*args, result) if isinstance(each, Tensor) and each.dim() > 1]
            self.rows += [max(each.stride()) for each in matrices]
        return result


def test_all_three_products_have_aligned_matrices() -> None:
    hidden, head = parts(True, torch.float32)
    with Products() as written:
        gradients(head(hidden), hidden, head)
    with Products() as padded:
        gradients(padded_linear(hidden, head.weight, head.bias, 16), hidden, head)
    assert any(row % 8 for row in written.rows) and len(padded.rows) >= 9
    assert not any(row % 8 for row in padded.rows), padded.rows


@pytest.mark.parametrize(("classes", "padded"), [(13, 16), (16, 16), (24, 24), (1, 8)])
def test_odd_numbers_of_classes_are_padded(classes: int, padded: int) -> None:
    assert padded_classes(torch.empty(classes, 2)) == padded


def test_numbers_that_have_fast_kernels_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIGNED, "cpu", 64)
    assert [padded_classes(torch.empty(n, 1)) for n in (50_257, 51_865, 50_264)] == [50_304, 51_904, 50_264]
    monkeypatch.delitem(ALIGNED, "cpu")
    assert padded_classes(torch.empty(51_865, 1)) == 51_865


def test_the_layer_is_padded_in_training_only() -> None:
    hidden, head = parts(False)
    padded = PaddedHead(head)
    padded.install()
    assert head(hidden).stride(1) == 16
    with torch.no_grad():
        assert head(hidden).is_contiguous()
    assert head.eval()(hidden).is_contiguous()
    padded.remove()
    assert "forward" not in vars(head) and head.train()(hidden).is_contiguous()


# ---- in training ----------------------------------------------------------------------------------------------------


class Config:
    is_encoder_decoder = True


class Speech(nn.Module):
    """Frames in, tokens out, with tied weights; `what` is how it gets its loss from the logits."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.config, self.what = Config(), what
        self.frames, self.tokens = nn.Linear(4, WIDTH), nn.Embedding(CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.tokens.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_features: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        before = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1].clamp(min=0)], 1)
        heard = self.frames(input_features).mean(1, keepdim=True)
        logits = self.head(torch.tanh(self.tokens(before).cumsum(1) + heard))
        loss = F.cross_entropy(logits.view(-1, CLASSES), labels.reshape(-1))
        if self.what == "reads the logits":
            loss = loss + 1e-2 * logits.square().mean()
        return {"loss": loss, "logits": logits}


def samples(count: int = 64) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for number in range(count):
        labels = torch.randint(0, CLASSES, (TOKENS,), generator=generator)
        labels[TOKENS - number % 5 :] = -100  # another number of targets each time
        made.append({"input_features": torch.randn(6, 4, generator=generator).double(), "labels": labels})
    return made


def train(model: nn.Module, folder: Any, *, resume: Any = None, callbacks: Any = (), **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4, "max_steps": 8, "learning_rate": 1e-2, "logging_steps": 1, "bf16": True,
        "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "speed": "max", **options,
    }  # fmt: skip
    args = TrainingArguments(str(folder), **arguments)
    trainer = Trainer(model.double(), args, train_dataset=samples(), callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def plan_of(trainer: Any) -> Any:
    return trainer._loopwright.run.speed.plan


def choice(trainer: Any, name: str) -> Any:
    return next((each for each in plan_of(trainer).choices if each.name == name), None)


def furthest(a: Any, b: Any) -> float:
    mine, other = a.model.state_dict(), b.model.state_dict()
    return max(float((mine[name] - other[name]).abs().max()) for name in mine)


# A share is a number in single precision where the graph reads it.
CLOSE = 1e-6


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_graph_has_the_fused_loss(accumulation: int, tmp_path: Any, on_a_cpu: Replay) -> None:
    options = {"gradient_accumulation_steps": accumulation}
    plain = train(Speech(), tmp_path / "a", speed="off", **options)
    fast = train(Speech(), tmp_path / "b", **options)
    plan = plan_of(fast)
    assert plan.graphed and plan.linear_loss and not plan.padded_head, plan.lines()
    assert "of all targets; same loss and gradient" in choice(fast, HEAD).reason
    assert on_a_cpu.replays > 4 and furthest(plain, fast) < CLOSE
    assert "forward" not in vars(fast.model.head)


def test_logits_that_are_read_are_padded(tmp_path: Any) -> None:
    plain = train(Speech("reads the logits"), tmp_path / "a", speed="off")
    fast = train(Speech("reads the logits"), tmp_path / "b")
    plan = plan_of(fast)
    assert plan.graphed and plan.padded_head and not plan.linear_loss, plan.lines()
    assert "used outside the loss" in choice(fast, HEAD).reason
    assert choice(fast, PADDED).reason.startswith("13 classes are computed as 16; same loss and gradient")
    assert furthest(plain, fast) < CLOSE


def test_without_graphs_the_layer_is_padded(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Acceleration, "graph_recorder", None)
    seen: list[int] = []
    written = output_layer.padded_linear
    monkeypatch.setattr(output_layer, "padded_linear", lambda *args: seen.append(1) or written(*args))
    fast = train(Speech(), tmp_path / "b")
    assert plan_of(fast).padded_head and not plan_of(fast).graphed, plan_of(fast).lines()
    assert len(seen) >= 8 and furthest(train(Speech(), tmp_path / "a", speed="off"), fast) < 1e-12


def test_in_whole_precision_nothing_is_padded(tmp_path: Any) -> None:
    fast = train(Speech("reads the logits"), tmp_path, bf16=False)
    assert not plan_of(fast).padded_head and choice(fast, PADDED) is None


def test_code_of_the_user_gets_the_logits_of_the_model(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strides = []

    class Reads(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**inputs)
            strides.append(outputs["logits"].is_contiguous())
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=4, bf16=True, report_to="none", save_strategy="no",
        use_cpu=True, disable_tqdm=True, speed="max",
    )  # fmt: skip
    trainer = Reads(Speech().double(), args, train_dataset=samples())
    trainer.train()
    assert not plan_of(trainer).padded_head and all(strides)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 1.001 * gradient


@pytest.mark.parametrize("what", ["logits", "weight", "cut"])
def test_a_wrong_product_is_refused(what: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(input: Tensor, weight: Tensor, bias: Any, classes: int) -> Tensor:
        if what == "weight":
            return F.linear(input, WrongGradient.apply(weight), bias)
        logits = F.linear(input, weight, bias)
        return logits * 1.001 if what == "logits" else logits[..., :-1]

    monkeypatch.setattr(output_layer, "padded_linear", wrong)
    plain = train(Speech("reads the logits"), tmp_path / "a", speed="off")
    fast = train(Speech("reads the logits"), tmp_path / "b")
    assert not plan_of(fast).padded_head and not choice(fast, PADDED).is_on
    assert what == "cut" or "differs" in choice(fast, PADDED).reason
    assert furthest(plain, fast) < CLOSE


def test_a_product_that_is_wrong_later_is_switched_off(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written, calls = output_layer.padded_linear, []

    def wrong_later(*args: Any) -> Tensor:
        calls.append(1)
        return written(*args) * (1.01 if len(calls) > 8 else 1.0)

    monkeypatch.setattr(Acceleration, "graph_recorder", None)
    monkeypatch.setattr(output_layer, "padded_linear", wrong_later)
    fast = train(Speech("reads the logits"), tmp_path, max_steps=12)
    assert not plan_of(fast).padded_head and "a later step differed" in choice(fast, PADDED).reason


@pytest.mark.parametrize("what", ["", "reads the logits"])
@pytest.mark.parametrize("start", [2, 4])
def test_a_resumed_run_is_the_same_to_the_last_bit(what: str, start: int, tmp_path: Any) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = train(Speech(what), tmp_path, **options)
    rest = train(Speech(what), tmp_path, resume=str(tmp_path / f"checkpoint-{start}"), **options)
    assert plan_of(rest) == plan_of(whole) and furthest(whole, rest) == 0.0
    assert plan_of(rest).padded_head is bool(what)


def test_a_plan_that_no_longer_holds_is_made_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    train(Speech("reads the logits"), tmp_path, **options)
    written = output_layer.padded_linear
    monkeypatch.setattr(output_layer, "padded_linear", lambda *args: 1.01 * written(*args))
    rest = train(Speech("reads the logits"), tmp_path, resume=str(tmp_path / "checkpoint-4"), **options)
    assert not plan_of(rest).padded_head and "differs" in choice(rest, PADDED).reason


def test_a_layer_that_changes_is_left_as_it_is(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Replaces(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 5:
                head, written = model.head, model.head.forward
                head.forward = lambda hidden: 2 * written(hidden)

    def run(speed: str) -> Any:
        return train(Speech("reads the logits"), tmp_path / speed, speed=speed, callbacks=[Replaces()])

    assert furthest(run("off"), run("max")) < CLOSE


@pytest.mark.parametrize("reads", [False, True])
def test_whisper_keeps_its_training(reads: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")

    def build() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.WhisperConfig(
            vocab_size=51, num_mel_bins=4, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=8,
            max_target_positions=64, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=1,
            decoder_start_token_id=1,
        )  # fmt: skip
        return transformers.WhisperForConditionalGeneration(config)

    if reads:  # as for a model that reads its logits
        monkeypatch.setattr(heads.HeadChoice, "_fused", lambda *args: None)
    generator = torch.Generator().manual_seed(5)
    data = [
        {"input_features": torch.randn(4, 16, generator=generator),
         "labels": torch.cat([torch.randint(2, 51, (length,), generator=generator), torch.full((2,), -100)])}
        for length in torch.randint(6, 12, (64,), generator=generator).tolist()
    ]  # fmt: skip

    def run(speed: str) -> Any:
        args = TrainingArguments(
            str(tmp_path / speed), per_device_train_batch_size=4, max_steps=8, logging_steps=1, bf16=True, use_cpu=True,
            report_to="none", save_strategy="no", disable_tqdm=True, speed=speed,
        )  # fmt: skip
        trainer = Trainer(build(), args, _padded_batch, train_dataset=data)
        trainer.train()
        return trainer

    plain, fast = run("off"), run("max")
    assert plan_of(fast).graphed and plan_of(fast).padded_head is reads, plan_of(fast).lines()
    assert plan_of(fast).linear_loss is not reads
    losses = [[row["loss"] for row in each.state.log_history if "loss" in row] for each in (plain, fast)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def _padded_batch(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    labels = nn.utils.rnn.pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_features": torch.stack([row["input_features"] for row in rows]), "labels": labels}


@pytest.mark.parametrize("is_wrong", [False, True])
def test_groups_of_pairs_have_a_padded_layer(
    is_wrong: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, only_groups: None
) -> None:
    pytest.importorskip("transformers")
    if is_wrong:
        wrong = lambda input, weight, bias, classes: F.linear(input, WrongGradient.apply(weight), bias)  # noqa: E731
        monkeypatch.setattr(output_layer, "padded_linear", wrong)
    data, options = pairs(96, "pair"), {"max_steps": 10, "gradient_accumulation_steps": 2, "bf16": True}
    plain = train_pairs(build("bart", "pair", vocab_size=VOCABULARY + 1), data, tmp_path, speed="off", **options)
    fast = train_pairs(build("bart", "pair", vocab_size=VOCABULARY + 1), data, tmp_path, speed="max", **options)
    assert fast.plan.graphed and fast.plan.layout in IN_GROUPS and fast.plan.padded_head is not is_wrong
    assert ("differs" if is_wrong else "65 classes are computed as 72") in choice(fast.trainer, PADDED).reason
    assert fast.losses == pytest.approx(plain.losses, rel=1e-5)

"""Operations are counted by watching, against what arithmetic says, and leave no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright.pt.measure.throughput as pacing
from loopwright.speed.measure.flops import LONGEST, Operations, count_operations, cut, trainable_share
from tests.models import Tokens, samples, trainer_of

WIDTH, HEADS, VOCAB = 16, 2, 32


class Attends(nn.Module):
    """Embedding, one block of attention and a head, with dropout and a buffer that counts calls."""

    def __init__(self, *, fused: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head, self.dropout = nn.Linear(WIDTH, VOCAB, bias=False), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.fused = fused

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> dict[str, Tensor]:
        self.calls += 1
        x = self.dropout(self.embed(input_ids))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        logits = self.head(self.out(y.transpose(1, 2).flatten(2)))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def batch_of(rows: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def counted(model: nn.Module, batch: Any, *, causal: bool = False) -> Operations | None:
    return count_operations(lambda b: model(**b), model, batch, "input_ids", causal=causal)


WEIGHTS = WIDTH * (3 * WIDTH + WIDTH + VOCAB)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("rows", "length"), [(1, 32), (2, 64), (8, 600)])
def test_two_lengths_tell_weights_from_attention(fused: bool, rows: int, length: int) -> None:
    model = Attends(fused=fused)
    if rows == 1:
        model.norm = nn.Identity()  # type: ignore[assignment]
    found = counted(model, batch_of(rows, length))
    assert found is not None
    assert found.per_token == pytest.approx(6 * WEIGHTS)
    assert found.per_square == pytest.approx(12 * WIDTH)  # two products of 2 x width, three times


def test_causal_attention_needs_half() -> None:
    whole, half = counted(Attends(), batch_of(2, 64)), counted(Attends(), batch_of(2, 64), causal=True)
    assert whole is not None and half is not None
    assert half.per_square == pytest.approx(whole.per_square / 2) and half.per_token == pytest.approx(whole.per_token)


def test_a_short_batch_is_counted_per_token() -> None:
    found = counted(Attends(), batch_of(2, 8))
    assert found is not None and found.per_square == 0
    assert found.per_token == pytest.approx(6 * WEIGHTS + 12 * WIDTH * 8)


def test_frozen_weights_need_no_gradient() -> None:
    model = Attends()
    for each in model.parameters():
        each.requires_grad_(False)
    found = counted(model, batch_of(2, 64))
    assert found is not None and found.per_token == pytest.approx(4 * WEIGHTS)
    assert trainable_share(model) == 0


def test_operations_of_samples() -> None:
    assert Operations(10, 2).of(5, 9) == 68
    assert Operations(10).of(5, float("nan")) == 50


def test_counting_leaves_no_trace() -> None:
    model = Attends().train()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert counted(model, batch_of(4, 64)) is not None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is gradients[name] for name, p in model.named_parameters())
    assert all(module.training for module in model.modules())


def test_compiled_blocks_are_counted_too() -> None:
    model = Attends()
    plain = counted(model, batch_of(2, 64))
    model.out.compile(backend="eager")
    model(**batch_of(2, 64))
    assert counted(model, batch_of(2, 64)) == plain


@pytest.mark.parametrize("batch", [{"x": torch.zeros(2, 3)}, {"input_ids": torch.zeros(2, 3)}])
def test_batches_without_tokens_are_not_counted(batch: Any) -> None:
    assert count_operations(lambda b: None, nn.Linear(1, 1), batch, "input_ids", causal=False) is None


def test_sequences_of_another_length_are_left_whole() -> None:
    batch = {"input_ids": torch.ones(4, 600, dtype=torch.int64), "labels": torch.ones(4, 7, dtype=torch.int64)}
    seen: list[Any] = []
    model = nn.Linear(4, 4)
    forward = lambda b: (seen.append(b), model(torch.zeros(3, 4)))  # noqa: E731
    count_operations(forward, model, batch, "input_ids", causal=False)
    assert [tuple(b["input_ids"].shape) for b in seen] == [(2, 600)]


def test_cut_takes_rows_and_tokens() -> None:
    batch = batch_of(5, 40) | {"square": torch.ones(5, 1, 40, 40), "scalar": torch.ones(()), "name": "x"}
    small = cut(batch, rows=2, old=40, new=LONGEST // 16)
    assert small["input_ids"].shape == (2, 16) and small["square"].shape == (2, 1, 16, 16)
    assert small["scalar"].ndim == 0 and small["name"] == "x"


def test_llama_needs_six_operations_per_weight_and_token() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    found = counted(model, batch_of(2, 64), causal=True)
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)
    assert found is not None
    # A little more than the weights: rotary positions are a matrix product too.
    assert found.per_token == pytest.approx(6 * matrices, rel=0.01)
    assert found.per_square == pytest.approx(6 * 2 * 32)


# ---- in a run -------------------------------------------------------------------------------------------------------


def test_a_cpu_run_counts_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "count_operations", lambda *a, **k: pytest.fail("counted"))
    trainer = trainer_of(Tokens(), samples([20] * 4), tmp_path, num_train_epochs=1)
    trainer.train()
    assert (
        trainer._loopwright.pacing.operations is None
        and trainer._loopwright.run.work.sample is None
        and "mfu" not in trainer.speed_report().numbers
    )


def test_a_device_with_a_peak_shows_its_utilization(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "device_peak", lambda device, dtype: 1e9)
    plain = trainer_of(Tokens(), samples([20] * 4), tmp_path / "a", num_train_epochs=2, logging_steps=2)
    plain.train()
    matrices = sum(p.numel() for n, p in plain.model.named_parameters() if p.ndim == 2 and "embed" not in n)
    counted = plain._loopwright.pacing.operations
    assert counted is not None and counted.per_token == pytest.approx(6 * matrices)
    assert plain._loopwright.run.work.sample is None
    numbers = plain.speed_report().numbers
    assert numbers["mfu"] == pytest.approx(numbers["tokens_per_second"] * 6 * matrices / 1e9, rel=1e-3)


def test_counting_changes_no_weight(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(folder: Any) -> list[Tensor]:
        torch.manual_seed(0)
        trainer = trainer_of(Attends(), samples([20] * 8), folder, num_train_epochs=1, per_device_train_batch_size=2,
                             logging_steps=1)  # fmt: skip
        trainer.train()
        return [each.detach() for each in trainer.model.state_dict().values()]

    without = weights(tmp_path / "a")
    monkeypatch.setattr(pacing, "device_peak", lambda device, dtype: 1e9)
    assert all(torch.equal(a, b) for a, b in zip(without, weights(tmp_path / "b"), strict=True))


def test_a_model_that_cannot_be_counted_trains_all_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(pacing, "device_peak", lambda device, dtype: 1e9)
    monkeypatch.setattr(pacing, "count_operations", broken)
    trainer = trainer_of(Tokens(), samples([20] * 4), tmp_path, num_train_epochs=1)
    trainer.train()
    assert "mfu" not in trainer.speed_report().numbers

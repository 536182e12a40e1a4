"""Training with micro-batches as CUDA graphs, and token budgets from a GPU's memory.

Also runs without pytest: `python3 tests/gpu/test_graphed_training.py`. Words after the name choose tests; each prints
what it measured on one line, and a failure does not stop the others.
"""

from __future__ import annotations

import copy
import gc
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]

import loopwright.speed.planner.decision as plan
from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.speed.planner.decision import GRAPHS
from tests.gpu.script import needs_gpu, run_tests

pytestmark = needs_gpu()

VOCABULARY, LENGTH = 2000, 128


def say(text: str) -> None:
    print(f"        {text}", flush=True)


def bert(dropout: float, layers: int = 12, width: int = 256) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    settings = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        num_labels=2,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(settings)


def llama(layers: int = 8) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(settings)


def fixed(count: int, task: str = "class") -> list[dict[str, Any]]:
    """Samples of one length; language models learn from a part of each that differs in size."""
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (count, LENGTH), generator=draws)
    if task == "class":
        return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2} for row in ids]
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.clone()} for row in ids]
    for number, row in enumerate(rows):
        row["labels"][: number % 50] = -100
    return rows


class Clock(TrainerCallback):
    """Milliseconds per update between two updates, the device's work included."""

    first, last = 10, 30
    started = milliseconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (self.first, self.last):
            torch.cuda.synchronize()
            now = time.perf_counter()
            self.started = now if state.global_step == self.first else self.started
            self.milliseconds = (now - self.started) / (self.last - self.first) * 1e3


def train(model: nn.Module, data: Any, folder: str | None = None, **options: Any) -> tuple[Trainer, list[float], Clock]:
    """A run of 30 updates in bf16; returns the trainer, the losses and the clock."""
    clock, resume, extra = Clock(), options.pop("resume", None), options.pop("callbacks", [])
    given = {name: options.pop(name) for name in ("eval_dataset", "data_collator") if name in options}
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 16, "max_steps": 30, "logging_steps": 1, "bf16": True, "save_strategy": "no",
        "disable_tqdm": True, "report_to": "none", "learning_rate": 1e-4, "speed": "max", **options,
    }  # fmt: skip
    args = TrainingArguments(folder or tempfile.mkdtemp(), **settings)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[clock, *extra], **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [row["loss"] for row in trainer.state.log_history if "loss" in row], clock


def graphs_of(trainer: Any) -> str:
    """That it trained with graphs, or why not."""
    found = [choice for choice in trainer._loopwright.run.speed.plan.choices if choice.name == GRAPHS]
    return (
        "on"
        if trainer._loopwright.run.speed.plan.graphed
        else "; ".join(choice.reason for choice in found) or "not considered"
    )


def apart(mine: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))


def compare(model: nn.Module, data: Any, tolerance: float, name: str, **options: Any) -> None:
    _, slow, slow_clock = train(copy.deepcopy(model), data, **{**options, "speed": "off"})
    graphed, fast, clock = train(copy.deepcopy(model), data, **options)
    off = apart(fast, slow)
    say(
        f"{name}: graphs {graphs_of(graphed)}; losses differ by at most {off:.1e}; "
        f"{slow_clock.milliseconds:.2f} -> {clock.milliseconds:.2f} ms per update; last loss {fast[-1]:.4f}"
    )
    is_flat = (
        graphed._loopwright.run.speed.plan.layout == plan.FLAT
    )  # one row of all samples: longer than what a launch takes
    assert (graphs_of(graphed) == "on" or is_flat) and off <= tolerance, (graphs_of(graphed), off)
    assert torch.isfinite(torch.tensor(fast)).all()


def test_bert_without_dropout() -> None:
    # Two eager runs in bf16 differ by as much: attention's backward adds in any order.
    compare(bert(0.0), fixed(512), 5e-3, "bert, dropout 0, bf16")


def test_bert_without_dropout_in_single_precision() -> None:
    compare(bert(0.0), fixed(512), 1e-4, "bert, dropout 0, fp32", bf16=False)


def test_bert_with_dropout() -> None:
    # A graph takes another kernel for attention, which drops others: curves agree as two seeds do.
    compare(bert(0.1), fixed(512), 0.15, "bert, dropout 0.1, bf16")


def test_bert_base_by_default() -> None:
    """What speed="auto" does to a launch-bound run that is long enough: a few looks, then graphs."""
    options = {"max_steps": 400, "logging_steps": 100, "speed": "auto"}
    trainer, _, _ = train(bert(0.1), fixed(512), **options)
    say(f"bert, auto, 400 updates: graphs {graphs_of(trainer)}")
    options["max_steps"] = 20_000
    trainer, _, _ = train(bert(0.1), fixed(512), callbacks=[StopAt(60)], **options)
    say(f"bert, auto, first 60 of 20,000 updates: graphs {graphs_of(trainer)}")
    assert graphs_of(trainer) == "on"


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


def test_accumulation_and_unequal_targets() -> None:
    """A language model's loss is divided by all targets of an update; the graph knows its share only."""
    # At speed="max" the fused loss would come first.
    options = {"gradient_accumulation_steps": 4, "max_steps": 50, "speed": "auto"}
    compare_auto(llama(), fixed(1024, "causal"), 1e-3, "llama, 4 micro-batches, prompts", **options)


@contextmanager
def however_short() -> Iterator[None]:
    """What pays in a long run is done in a short one."""
    before = dict(plan.WORTH_SECONDS)
    plan.WORTH_SECONDS["cuda"] = 0.0
    try:
        yield
    finally:
        plan.WORTH_SECONDS.update(before)


def compare_auto(model: nn.Module, data: Any, tolerance: float, name: str, **options: Any) -> None:
    """As `compare`, for what is decided after twenty looks."""
    Clock.first, Clock.last = 30, 50
    try:
        with however_short():
            compare(model, data, tolerance, name, **options)
    finally:
        Clock.first, Clock.last = 10, 30


class NoWaiting(TrainerCallback):
    """Makes every wait of the host for the device an error, once graphs are recorded and checked."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 28:
            torch.cuda.set_sync_debug_mode("default")


def test_nobody_waits() -> None:
    try:
        trainer, _, clock = train(bert(0.1), fixed(512), logging_steps=30, callbacks=[NoWaiting()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    say(f"bert: 30 updates without a wait between log points, {clock.milliseconds:.2f} ms per update")
    assert graphs_of(trainer) == "on"


class Stack(nn.Module):
    """Equal blocks with large activations, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(8))
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": (x.float().mean((1, 2)) - labels).square().mean()}


def test_comparisons_take_about_the_memory_of_training_as_written() -> None:
    """In the eighth update too, when there are graphs; they are recorded again after it."""
    data = [{"x": torch.randn(128, 512), "labels": torch.zeros(())} for _ in range(256)]
    peaks: list[float] = []
    trainer: Any
    for speed in ("off", "max"):
        trainer = None  # its weights are not counted again
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trainer, found, _ = train(Stack(), data, speed=speed, max_steps=12, per_device_train_batch_size=32)
        peaks.append(torch.cuda.max_memory_allocated() / 2**20)
    chosen = trainer._loopwright.run.speed.plan
    weights = sum(p.numel() * p.element_size() for p in trainer.model.parameters()) / 2**20
    say(
        f"memory: {peaks[0]:,.0f} MiB as written, {peaks[1]:,.0f} with graphs {graphs_of(trainer)} and compiled "
        f"{chosen.region or 'nothing'}; weights {weights:,.0f}; last loss {found[-1]:.4f}"
    )
    assert graphs_of(trainer) == "on" and chosen.region
    # cuBLAS has workspaces of 32 MiB for each thread and stream; those of graphs are freed with them.
    assert peaks[1] <= peaks[0] + weights + 100


def test_resuming() -> None:
    for deterministic in (False, True):
        folder = tempfile.mkdtemp()
        options = {"save_strategy": "steps", "save_steps": 15, "full_determinism": deterministic}
        try:
            whole, losses, _ = train(bert(0.1), fixed(512), folder, **options)
            rest, again, _ = train(bert(0.1), fixed(512), folder, resume=f"{folder}/checkpoint-15", **options)
        finally:
            torch.use_deterministic_algorithms(False)
        pairs = zip(whole.model.state_dict().values(), rest.model.state_dict().values(), strict=True)
        exact = all(torch.equal(a, b) for a, b in pairs)
        off = apart(again[-15:], losses[-15:])
        say(
            f"bert: resumed at 15, full_determinism={deterministic}: graphs {graphs_of(rest)}, losses differ by "
            f"{off:.1e}, weights bit for bit: {exact}"
        )
        assert graphs_of(whole) == graphs_of(rest) and off < 1e-3
        assert exact if deterministic else graphs_of(rest) == "on"


def test_evaluating_saving_and_skipping() -> None:
    class Breaks(TrainerCallback):
        """Two updates whose loss is not a number."""

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step in (7, 12):
                self.kept = model.classifier.bias.data.clone()
                model.classifier.bias.data.fill_(float("nan"))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step in (8, 13):
                model.classifier.bias.data.copy_(self.kept)

    data, found = fixed(512), {}
    for level in ("off", "max"):
        trainer, _, _ = train(
            bert(0.0), data, speed=level, on_nonfinite="skip", eval_strategy="steps", eval_steps=10,
            eval_dataset=data[:64], save_strategy="steps", save_steps=10, callbacks=[Breaks()], max_grad_norm=0.5,
        )  # fmt: skip
        found[level] = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    off = apart(found["max"], found["off"])
    say(f"bert: skipped updates, evaluation, saving: graphs {graphs_of(trainer)}, eval losses differ by {off:.1e}")
    assert graphs_of(trainer) == "on" and off < 1e-3 and len(found["max"]) == 3


def test_hooks_and_several_shapes() -> None:
    model = bert(0.0, layers=4)
    model.bert.pooler.register_forward_hook(lambda *_: None)
    trainer, _, _ = train(model, fixed(512))
    say(f"bert with a hook: graphs: {graphs_of(trainer)}")
    assert "a hook on bert.pooler" in graphs_of(trainer)
    data = [{name: value[: (32, 64, 128)[n // 16 % 3]] if value.dim() else value for name, value in row.items()}
            for n, row in enumerate(fixed(960))]  # fmt: skip
    options = {"train_sampling_strategy": "sequential"}
    _, slow, _ = train(bert(0.0), data, speed="off", **options)
    trainer, fast, _ = train(bert(0.0), data, **options)
    say(f"bert, three lengths: graphs {graphs_of(trainer)}, losses differ by {apart(fast, slow):.1e}")
    assert graphs_of(trainer) == "on" and apart(fast, slow) < 5e-3


def uneven(count: int) -> list[dict[str, Any]]:
    """Samples of many lengths, most of them short."""
    draws = torch.Generator().manual_seed(1)
    lengths = (torch.rand(count, generator=draws) ** 3 * (LENGTH - 8)).long() + 8
    return [{"input_ids": row["input_ids"][:length], "labels": row["labels"]}
            for row, length in zip(fixed(count), lengths.tolist(), strict=True)]  # fmt: skip


def test_rows_of_a_few_lengths() -> None:
    data, options = uneven(2048), {"data_collator": collate, "max_steps": 60}
    Clock.first, Clock.last = 40, 60
    try:
        compare(bert(0.0), data, 5e-3, "bert, uneven, dropout 0, bf16", **options)
        compare(bert(0.1), data, 0.15, "bert, uneven, dropout 0.1, bf16", **options)
    finally:
        Clock.first, Clock.last = 10, 30
    folder = tempfile.mkdtemp()
    options |= {"save_strategy": "steps", "save_steps": 20}
    whole, losses, _ = train(bert(0.1), data, folder, **options)
    rest, again, _ = train(bert(0.1), data, folder, resume=f"{folder}/checkpoint-20", **options)
    assert whole._loopwright.run.speed.plan.few_shapes and rest._loopwright.run.speed.plan.few_shapes
    pairs = zip(whole.model.state_dict().values(), rest.model.state_dict().values(), strict=True)
    exact, off = all(torch.equal(a, b) for a, b in pairs), apart(again[-40:], losses[-40:])
    say(f"bert, uneven: resumed at 20: losses differ by {off:.1e}, weights bit for bit: {exact}")
    assert exact and off == 0.0


# ---- token budgets ---------------------------------------------------------------------------------------------------


def ragged(count: int, longest: int, task: str) -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(2)
    made = []
    for _ in range(count):
        length = int(torch.randint(16, longest + 1, (), generator=draws))
        ids = torch.randint(5, VOCABULARY, (length,), generator=draws)
        made.append({"input_ids": ids, "labels": ids.clone() if task == "causal" else ids[: length // 4 + 2].clone()})
    return made


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    def pad(name: str, value: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)

    ids = pad("input_ids", 0)
    labels = pad("labels", -100) if rows[0]["labels"].dim() else torch.stack([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def t5() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    settings = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=512, d_kv=64, d_ff=1024, num_layers=6, num_heads=8, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(settings)


class Peak(TrainerCallback):
    """The most memory updates took, once everything is decided."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gib = torch.cuda.max_memory_allocated() / 2**30


def budget_line(trainer: Any, peak: Peak) -> str:
    made = trainer._loopwright.run.speed.plan
    return f"{made.layout}, {made.activations}, up to {made.budget:,} tokens, peak {peak.gib:.1f} GiB"


def test_pairs_share_rows_up_to_what_fits() -> None:
    data, peak = ragged(2048, 512, "pair"), Peak()
    options = {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 8, "data_collator": collate}
    _, slow, slow_clock = train(t5(), data, speed="off", **options)
    trainer, fast, clock = train(t5(), data, callbacks=[peak], **options)
    say(
        f"t5: {budget_line(trainer, peak)}; losses differ by {apart(fast, slow):.1e}; "
        f"{slow_clock.milliseconds:.1f} -> {clock.milliseconds:.1f} ms per update"
    )
    made = trainer._loopwright.run.speed.plan
    assert made.layout == plan.PAIRED and made.budget > 8 * 640
    assert apart(fast, slow) < 1e-2


def wide_llama() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=8, pad_token_id=0, max_position_embeddings=4096,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(settings)


def test_a_small_device_recomputes() -> None:
    """The same model on all of the memory, and on parts of it: the estimate must hold, and losses stay."""
    data, curves, failures = ragged(2048, 1024, "causal"), [], []
    whole = torch.cuda.get_device_properties(0).total_memory
    # By default, so that a run this short compiles nothing.
    options = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 16, "data_collator": collate}
    for gib in (None, 24, 14, 10):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else gib * 2**30 / whole)
        peak = Peak()
        try:
            with however_short():
                trainer, losses, clock = train(wide_llama(), data, callbacks=[peak], speed="auto", **options)
        except torch.OutOfMemoryError as error:
            failures.append(gib)
            say(f"llama 0.3B, {gib or 'all'} GiB: out of memory: {str(error).splitlines()[0][:160]}")
            continue
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        reason = next(
            (c.reason for c in trainer._loopwright.run.speed.plan.choices if c.name == "token budget"), "no budget"
        )
        say(f"llama 0.3B, {gib or 'all'} GiB: {budget_line(trainer, peak)}, {clock.milliseconds:.0f} ms; {reason}")
        curves.append(losses)
        del trainer
        assert gib is not None or f"{plan.ROW_TOKENS:,} tokens" in reason
    assert not failures and max(apart(each, curves[0]) for each in curves[1:]) < 1e-2


if __name__ == "__main__":
    sys.exit(run_tests(globals()))

"""What can only be shown on a GPU; also runs without pytest: `python tests/gpu/test_one_gpu.py`."""

from __future__ import annotations

import copy
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]

from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.errors import NonFiniteError
from tests.gpu.script import needs_gpu, run_tests
from tests.models import TASKS, Regression, losses, regression_data

pytestmark = needs_gpu()


def train(
    model: nn.Module, data: Any, *, cls: Any = Trainer, resume: Any = None, callbacks: Any = None, **options: Any
) -> Any:
    defaults = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "save_strategy": "no", "logging_steps": 1,
                "disable_tqdm": True, "learning_rate": 1e-2, "seed": 3}  # fmt: skip
    folder = options.pop("output_dir", None) or tempfile.mkdtemp()
    args = TrainingArguments(folder, **{**defaults, **options})
    trainer = cls(model, args, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in pairs)


class NoWaiting(TrainerCallback):
    """Makes every wait of the host for the device an error, except at log points."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 18:
            torch.cuda.set_sync_debug_mode("default")


class NextToken(nn.Module):
    """A language model that does not look at its own numbers, as transformers' models do when they build masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout, self.head = nn.Embedding(50, 16), nn.Dropout(0.1), nn.Linear(16, 50)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.dropout(self.embedding(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def test_no_wait_between_log_points() -> None:
    for model, name in ((Regression(0.1), "regression"), (NextToken(), "llama")):
        for accumulation, extra in ((1, {}), (3, {}), (1, {"bf16": True}), (1, {"on_nonfinite": "skip"})):
            try:
                trainer = train(
                    model, TASKS[name].data(96 * accumulation), callbacks=[NoWaiting()], max_steps=20,
                    logging_steps=20, gradient_accumulation_steps=accumulation, **extra,
                )  # fmt: skip
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert trainer.state.global_step == 20, (name, accumulation)


def test_class_weights_written_for_cpu_work() -> None:
    class Weighted(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    trainer = train(TASKS["bert"].model(0.0), TASKS["bert"].data(16), cls=Weighted)
    assert trainer.evaluate()["eval_loss"] > 0


def test_numbers_agree_with_the_cpu_and_with_transformers() -> None:
    import transformers

    for name in TASKS:
        torch.manual_seed(0)
        model, data = TASKS[name].model(0.0), TASKS[name].data(24)
        gpu, cpu = (losses(train(copy.deepcopy(model), data, use_cpu=use_cpu)) for use_cpu in (False, True))
        args = transformers.TrainingArguments(
            tempfile.mkdtemp(), per_device_train_batch_size=4, num_train_epochs=2, save_strategy="no", logging_steps=1,
            disable_tqdm=True, learning_rate=1e-2, seed=3, report_to="none",
        )  # fmt: skip
        theirs = transformers.Trainer(copy.deepcopy(model), args, train_dataset=data)
        theirs.train()
        for a, b, c in zip(gpu, cpu, losses(theirs), strict=True):
            assert abs(a - c) <= 1e-5 * abs(c), (name, a, c)
            assert abs(a - b) <= 2e-3 * abs(b), (name, a, b)


def test_half_precision_trains_and_keeps_fp32_weights() -> None:
    for options in ({"bf16": True}, {"fp16": True}, {"tf32": True}):
        trainer = train(TASKS["llama"].model(0.0), TASKS["llama"].data(32), **options)
        found = losses(trainer)
        assert all(map(torch.isfinite, torch.tensor(found))) and found[-1] < found[0], (options, found)
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_fp16_overflow_does_not_move_weights_or_schedule() -> None:
    class Overflow(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            loss = model(**inputs)["loss"]
            return loss * float("inf") if self.state.global_step == 2 else loss

    trainer = train(Regression(), regression_data(20), cls=Overflow, fp16=True, num_train_epochs=1)
    rates = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
    assert rates[2] == rates[3] and all(p.isfinite().all() for p in trainer.model.parameters())


def test_a_skipped_update_changes_nothing() -> None:
    seen: list[dict[str, Any]] = []

    class Watch(TrainerCallback):
        def note(self, model: Any, optimizer: Any) -> None:
            state = optimizer.state_dict()["state"]
            seen.append({"w": [p.detach().clone() for p in model.parameters()], "s": copy.deepcopy(state)})

        def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            if state.global_step == 2:
                self.note(kw["model"], kw["optimizer"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            if state.global_step == 3:
                self.note(kw["model"], kw["optimizer"])

    class Bad(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = model(**inputs)["loss"]
            return loss * float("nan") if self.state.global_step == 2 else loss

    trainer = train(Regression(), regression_data(24), cls=Bad, on_nonfinite="skip", callbacks=[Watch()])
    before, after = seen
    assert all(torch.equal(a, b) for a, b in zip(before["w"], after["w"], strict=True))
    for index, slots in before["s"].items():
        assert all(torch.equal(value, after["s"][index][slot]) for slot, value in slots.items())
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_resume_is_bit_exact_under_full_determinism_also_with_async_saves() -> None:
    for name in ("regression", "llama"):
        for background in (True, False):
            torch.manual_seed(0)
            model, data, folder = TASKS[name].model(0.2), TASKS[name].data(40), tempfile.mkdtemp()
            options = {"full_determinism": True, "save_strategy": "steps", "save_steps": 3, "async_save": background}
            whole = train(copy.deepcopy(model), data, output_dir=folder, **options)
            for step in (3, 12):
                part = train(copy.deepcopy(model), data, resume=f"{folder}/checkpoint-{step}", **options)
                assert same(whole.model, part.model), (name, step)
                assert losses(part) == losses(whole)
    torch.use_deterministic_algorithms(False)


def test_a_checkpoint_moves_between_gpu_and_cpu() -> None:
    torch.manual_seed(0)
    model, data, folder = Regression(), regression_data(24), tempfile.mkdtemp()
    train(copy.deepcopy(model), data, output_dir=folder, save_strategy="steps", save_steps=4)
    back = train(copy.deepcopy(model), data, resume=f"{folder}/checkpoint-4", use_cpu=True)
    assert back.state.global_step == 12


def test_out_of_memory_is_answered_by_smaller_micro_batches() -> None:
    class Hungry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Regression()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            waste = torch.empty(len(x), 2**28, device=x.device)  # 1 GiB a sample
            return {"loss": self.inner(x, labels)["loss"] + 0 * waste[0, 0].nan_to_num()}

    torch.manual_seed(0)
    model, data = Hungry(), regression_data(32)
    # First, so that cuBLAS has its workspaces, which would otherwise lie in the middle of a block of 4 GiB.
    whole = train(copy.deepcopy(model.inner), data, per_device_train_batch_size=16)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(5 * 2**30 / total)
    try:
        small = train(copy.deepcopy(model), data, per_device_train_batch_size=16, auto_find_batch_size=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert small._loopwright.run.micro_split == 4
    for a, b in zip(losses(small), losses(whole), strict=True):
        assert abs(a - b) < 1e-5 * abs(b)


def test_an_update_that_is_not_finite_is_found_at_the_next_log_point() -> None:
    class Bad(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = model(**inputs)["loss"]
            return loss * float("nan") if self.state.global_step == 6 else loss

    folder = tempfile.mkdtemp()
    model = Regression()
    try:
        train(model, regression_data(60), cls=Bad, on_nonfinite="raise", logging_steps=5, output_dir=folder)
    except NonFiniteError as error:
        assert "at step 7;" in str(error), error
    else:
        raise AssertionError("the NaN went unnoticed")
    assert all(p.isfinite().all() for p in model.parameters())
    assert (Path(folder) / "incident-step-7" / "incident.json").is_file()


def test_compiled_blocks_give_the_same_losses_and_names() -> None:
    torch.manual_seed(0)
    model, data = TASKS["llama"].model(0.0), TASKS["llama"].data(32)
    eager = train(copy.deepcopy(model), data)
    compiled = train(copy.deepcopy(model), data, torch_compile=True)
    for a, b in zip(losses(compiled), losses(eager), strict=True):
        assert abs(a - b) <= 1e-3 * abs(b)
    assert list(compiled.model.state_dict()) == list(eager.model.state_dict())


def test_resuming_needs_no_more_memory_than_the_first_run() -> None:
    folder, peaks = tempfile.mkdtemp(), []

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(8))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return {"loss": (x.mean(-1) - labels).pow(2).mean()}

    data = [{"x": torch.randn(2048), "labels": torch.randn(())} for _ in range(32)]
    for resume in (None, f"{folder}/checkpoint-4"):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(Wide(), data, output_dir=folder, resume=resume, save_strategy="steps", save_steps=4, max_steps=8)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.02 * peaks[0], peaks


def test_generation_in_evaluation() -> None:
    from loopwright import Seq2SeqTrainer, Seq2SeqTrainingArguments

    args = Seq2SeqTrainingArguments(tempfile.mkdtemp(), predict_with_generate=True, generation_max_length=5)
    output = Seq2SeqTrainer(TASKS["t5"].model(0.0), args).predict(TASKS["t5"].data(6))
    assert output.predictions.shape[0] == 6 and output.metrics["test_loss"] > 0


def test_evaluation_memory_is_flat() -> None:
    trainer = train(TASKS["bert"].model(0.0), TASKS["bert"].data(8))
    peaks = []
    for batches in (10, 200):
        torch.cuda.reset_peak_memory_stats()
        trainer.evaluate(TASKS["bert"].data(8 * batches))
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] - peaks[0] < 2**20, peaks


def milliseconds_per_update(library: Any, task: str, updates: int = 200) -> float:
    args = library.TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=4, num_train_epochs=1, save_strategy="no", disable_tqdm=True,
        report_to="none",
    )  # fmt: skip
    trainer = library.Trainer(TASKS[task].model(0.0), args, train_dataset=TASKS[task].data(4 * updates))
    torch.cuda.synchronize()
    start = time.perf_counter()
    trainer.train()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / updates * 1e3


def report_speed() -> None:
    """Milliseconds per update of small models, ours and transformers' (a number to look at, not a test)."""
    import transformers

    import loopwright

    for name in ("regression", "bert", "llama"):
        row = [milliseconds_per_update(library, name) for library in (loopwright, transformers) * 2]
        print(f"{name}: loopwright {min(row[0::2]):.3f} ms/update, transformers {min(row[1::2]):.3f} ms/update")


def main() -> int:
    failed = run_tests(globals())
    if len(sys.argv) < 2:
        report_speed()
    return failed


if __name__ == "__main__":
    sys.exit(main())

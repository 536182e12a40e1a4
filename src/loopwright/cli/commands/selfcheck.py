"""`loopwright selfcheck`: train ten steps on the CPU and on the device, and compare them in a report."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ... import __version__
from ...notices import logger

STEPS = 10
TOLERANCE = 1e-3
"""Allowed difference of losses: devices sum in another order, and some multiply in lower precision."""


def run(words: list[str]) -> int:
    """Train on both and print the report; returns 0 if they agree."""
    parser = argparse.ArgumentParser(prog="loopwright selfcheck", description=__doc__)
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="print JSON, or write it to a file")
    parser.add_argument("--compile", action="store_true", help="compile the model with the device's own backend")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        report = check(folder, compile_model=options.compile)
    print(json.dumps(report) if options.json == "-" else text_of(report))
    if options.json not in (None, "-"):
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if report["passed"] else 1


def check(folder: str, *, compile_model: bool = False) -> dict[str, Any]:
    """Results of ten steps, evaluation, saving and resuming on the CPU and on the device."""
    from ... import TrainingArguments

    device = TrainingArguments(folder).device
    level = logger.level  # the check trains without logs; the level is restored afterwards
    try:
        reference = _train(f"{folder}/cpu", use_cpu=True)
        found = _attempt(lambda: _train(f"{folder}/device", use_cpu=False, torch_compile=compile_model))
    finally:
        logger.setLevel(level)
    report: dict[str, Any] = {
        "loopwright": __version__,
        "python": sys.version.split()[0],
        "torch": _version("torch"),
        "torch_xla": _version("torch_xla"),
        "device": device.type,
        "device_name": _name_of(device),
        "steps": STEPS,
        "tolerance": TOLERANCE,
        "cpu": reference,
        "on_device": found,
        "passed": False,
    }
    if "error" not in found:
        pairs = list(zip(reference["losses"], found["losses"], strict=True))
        report["differences"] = [abs(one - other) for one, other in pairs]
        report["largest_difference"] = max(report["differences"])
        report["passed"] = report["largest_difference"] <= TOLERANCE and found["resumed_exactly"]
    return report


def text_of(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [f"{name:12} {report[name]}" for name in ("loopwright", "python", "torch", "torch_xla") if report[name]]
    lines.append(f"{'device':12} {report['device']} {report['device_name']}".rstrip())
    found = report["on_device"]
    if "error" in found:
        return "\n".join([*lines, "", f"training on the device failed: {found['error']}"])
    lines += ["", "step      loss on the CPU   on the device   difference"]
    rows = zip(report["cpu"]["losses"], found["losses"], report["differences"], strict=True)
    for number, (one, other, apart) in enumerate(rows, start=1):
        name = "eval" if number > STEPS else str(number)
        lines.append(f"{name:>4}  {one:19.7f} {other:15.7f} {apart:12.1e}")
    gone_on = "bitwise identical" if found["resumed_exactly"] else "DIFFERENT"
    lines += ["", f"saved, loaded and resumed: {gone_on}"]
    lines.append(f"graphs compiled: {found['graphs']}" if found["graphs"] is not None else "")
    verdict = "the device agrees with the CPU" if report["passed"] else "THE DEVICE DOES NOT AGREE WITH THE CPU"
    return "\n".join([*lines, f"{verdict} (largest difference {report['largest_difference']:.1e})"])


def _train(folder: str, *, use_cpu: bool, torch_compile: bool = False) -> dict[str, Any]:
    """Losses of ten steps and an evaluation, and whether a run that is stopped and resumed ends with equal weights."""
    import torch

    started = time.perf_counter()
    whole = _trainer(f"{folder}/whole", use_cpu, torch_compile)
    whole.train()
    losses = [log[key] for log in whole.state.log_history for key in ("loss", "eval_loss") if key in log]
    guard = whole._loopwright.strategy.guard
    graphs = None if guard is None else guard.graphs
    again = _trainer(f"{folder}/again", use_cpu, torch_compile)
    again.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-{STEPS // 2}")
    pairs = zip(whole.model.parameters(), again.model.parameters(), strict=True)
    exact = all(torch.equal(one.detach().cpu(), other.detach().cpu()) for one, other in pairs)
    return {"losses": losses, "resumed_exactly": exact, "graphs": graphs, "seconds": time.perf_counter() - started}


def _trainer(folder: str, use_cpu: bool, torch_compile: bool) -> Any:
    import torch

    from ... import NeuronTrainer, TrainingArguments
    from ..selfcheck_model import TinyLanguageModel, pad_rows, ragged_rows

    args = TrainingArguments(
        folder, use_cpu=use_cpu, max_steps=STEPS, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        static_lengths=[32], logging_steps=1, save_steps=STEPS // 2, eval_strategy="steps", eval_steps=STEPS,
        learning_rate=1e-2, optim="adamw_torch", report_to=[], disable_tqdm=True, speed="off", async_save=False,
        torch_compile=torch_compile, log_level="error",
    )  # fmt: skip
    torch.manual_seed(0)
    rows = ragged_rows(22)
    trainer = NeuronTrainer(
        model=TinyLanguageModel(), args=args, data_collator=pad_rows, train_dataset=rows, eval_dataset=rows[:6]
    )
    from ...callbacks.printer import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    return trainer


def _attempt(train: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = train()
    except Exception as error:  # every failure goes into the report
        return {"error": f"{type(error).__name__}: {error}"}
    return found


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _name_of(device: Any) -> str:
    import torch

    ask = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return str(ask(device)) if ask is not None else ""

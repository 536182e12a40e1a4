"""Evaluation and prediction on one GPU: samples per second, with the time of the first call, and the same metrics.

    python benchmarks/evaluation.py [--model 1.24b|bert] [--arms loopwright,transformers] [--samples N] [--batch N]

`1.24b` evaluates a Llama-like model (the loss only), `bert` predicts classes of texts (logits of every sample). The
data is evaluated twice: the first call includes all that is proved, recorded or compiled (transformers gets an eighth
of the data), the second is timed, and repeated while it is short. An arm is void if its loss, or the losses of a few
samples alone, differ from transformers' (over many tokens, losses of an untrained model would hide a difference), or if
its logits are further than transformers' from those in single precision. The numbers are written after each arm, and
those of other arms that the file already has are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from arms import default_file, write_json
from processes import Result, child, run_arm

ARMS = ("loopwright", "loopwright-off", "transformers")
REFERENCE = "transformers"
SAMPLES = {"1.24b": 1024, "bert": 8192, "tiny": 64, "tiny-bert": 64}
BATCH = {"1.24b": 8, "bert": 32, "tiny": 8, "tiny-bert": 8}
TARGETS = {"1.24b": 4.0, "bert": 5.0}
LOSS_APART, SINGLE_APART = 5e-3, 1e-3
"""Largest relative difference of losses (transformers' is a mean of batches), and of single samples' losses."""
ERROR_RATIO = 1.25
"""How many times the rounding error of transformers' logits an arm's may have: bf16 rounds differently."""
CLASSES = 256
"""Classes of BERT; the data has two, and odd and even ones count as these. The rounding error of a logit differs
fourfold between logits, and is almost the same in all samples."""
SINGLES = 6
KEPT_ROWS = 64
TIMED_SECONDS, MOST_CALLS = 3.0, 8


def task(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model and the data."""
    import bert
    import sft
    import torch
    from lengths import CLASSIFICATION, Texts

    torch.manual_seed(42)
    is_bert = "bert" in options.model
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        if is_bert:
            shape = bert.MODELS["base" if options.model == "bert" else "tiny"]
            model = shape.build(classes=CLASSES)
        else:
            shape = sft.MODELS[options.model]
            model = shape.build()
    lengths = CLASSIFICATION if is_bert else sft.lengths_of(options)
    return model, Texts("class" if is_bert else "causal", options.samples, lengths, shape.vocabulary)


def work(options: argparse.Namespace, arm: str) -> Result:
    """Evaluate twice with one library."""
    import torch
    from lengths import pad

    library = __import__("transformers" if arm == "transformers" else "loopwright")
    model, data = task(options)
    on_gpu = torch.cuda.is_available()
    more = {"speed": "off"} if arm == "loopwright-off" else {}
    arguments = library.TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_eval_batch_size=options.batch, bf16=on_gpu, report_to="none",
        disable_tqdm=True, use_cpu=not on_gpu, **more,
    )  # fmt: skip
    trainer = library.Trainer(model, arguments, data_collator=pad, eval_dataset=data)
    # What transformers does in its first call, it does for a part of the data too.
    first_s, _ = timed(trainer, data if arm == "loopwright" else data.first(len(data) // 8), options)
    calls = [timed(trainer, data, options)]
    while sum(seconds for seconds, _ in calls) < TIMED_SECONDS and len(calls) < MOST_CALLS:
        calls.append(timed(trainer, data, options))
    seconds, found = sum(each for each, _ in calls) / len(calls), calls[-1][1]
    tokens = int(data.lengths.sum())
    report = trainer.speed_report().as_dict() if hasattr(trainer, "speed_report") else {}
    if "logits" in found:
        found["logits_error"] = rounding_error(trainer.model, data, found["logits"])
    return {
        "status": "ok",
        "samples_per_s": len(data) / seconds,
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
        "calls": [each for each, _ in calls],
        "first_call_s": first_s,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        **found,
        "singles": singles(trainer, data) if "bert" not in options.model else [],
        "choices": report.get("choices", []),
    }


def timed(trainer: Any, data: Any, options: argparse.Namespace) -> tuple[float, Result]:
    """One evaluation or prediction, and what it found."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    if "bert" in options.model:
        output = trainer.predict(data)
        seconds = time.perf_counter() - started
        logits = output.predictions
        found = {
            "loss": float(output.metrics["test_loss"]),
            "accuracy": float((logits.argmax(-1) % 2 == output.label_ids).mean()),
            "spread": float(logits.std()),
            "logits": [[round(float(each), 5) for each in row] for row in logits[:KEPT_ROWS]],
        }
    else:
        found = {"loss": float(trainer.evaluate(data)["eval_loss"])}
        seconds = time.perf_counter() - started
    return seconds, found


def rounding_error(model: Any, data: Any, logits: list[list[float]]) -> float:
    """Distance of the first logits from those in single precision, relative to their spread."""
    import numpy as np
    import torch

    device = next(model.parameters()).device
    model.eval()
    exact = []
    with torch.no_grad():
        for place in range(len(logits)):
            sample = {name: torch.as_tensor(value)[None].to(device) for name, value in data[place].items()}
            exact.append(model(**{name: value for name, value in sample.items() if name != "labels"}).logits[0])
    expected = torch.stack(exact).float().cpu().numpy()
    return float(((np.array(logits) - expected) ** 2).mean() ** 0.5 / max(expected.std(), 1e-12))


def singles(trainer: Any, data: Any) -> list[float]:
    """The losses of a few samples, one at a time."""
    import torch

    chosen = [torch.utils.data.Subset(data, [place]) for place in range(SINGLES)]
    return [float(trainer.evaluate(each)["eval_loss"]) for each in chosen]


def judge(results: dict[str, Result]) -> None:
    """Void the arms whose results are not those of the reference."""
    reference = results.get(REFERENCE, {})
    for arm, result in results.items():
        if arm == REFERENCE or reference.get("status") != "ok" or result.get("status") not in ("ok", "void"):
            continue
        apart = abs(result["loss"] - reference["loss"]) / abs(reference["loss"])
        result["loss_apart"] = apart
        each = [abs(a - b) / abs(b) for a, b in zip(result["singles"], reference["singles"], strict=True)]
        result["singles_apart"] = max(each, default=0.0)
        is_same = apart <= LOSS_APART and result["singles_apart"] <= SINGLE_APART
        if "logits" in reference:
            pairs = zip(sum(result["logits"], []), sum(reference["logits"], []), strict=True)
            result["logits_apart"] = max(abs(a - b) for a, b in pairs) / max(reference["spread"], 1e-12)
            error = result["logits_error"]
            is_same = is_same and error <= ERROR_RATIO * reference["logits_error"] + 1e-6 and math.isfinite(error)
        result["status"] = "ok" if is_same else "void"
        result["times_transformers"] = result["samples_per_s"] / reference["samples_per_s"]


def line(arm: str, result: Result) -> str:
    if result.get("status") != "ok":
        return f"{arm:<16} {result.get('status')}: {result.get('note', '')} {result.get('log', '')[-1500:]}"
    times = result.get("times_transformers")
    ratio = "" if times is None else f", {times:.2f} x transformers"
    return (
        f"{arm:<16} {result['samples_per_s']:,.1f} samples/s, {result['tokens_per_s']:,.0f} real tokens/s, first call "
        f"{result['first_call_s']:.1f} s, loss {result['loss']:.6f}{ratio}"
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Evaluation and prediction on one GPU.")
    parser.add_argument("--model", choices=SAMPLES, default="1.24b")
    parser.add_argument("--arms", default="loopwright,transformers", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--batch", type=int, help="per_device_eval_batch_size")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which an arm is given up")
    parser.add_argument("--json", type=Path, help="where the numbers go; benchmarks/results/ if not said")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    words = sys.argv[1:]
    options = parser().parse_args(words)
    options.samples = options.samples or SAMPLES[options.model]
    options.batch = options.batch or BATCH[options.model]
    if options.arm:
        child(options, lambda: work(options, options.arm))
        return
    name = f"evaluation-{options.model}"
    file = options.json or default_file(name)
    results: dict[str, Result] = json.loads(file.read_text())["results"] if file.exists() else {}
    started = time.perf_counter()
    for arm in options.arms.split(","):
        results[arm] = run_arm(__file__, arm, words, options.timeout)
        described = results[arm].pop("described", {})
        judge(results)
        about = {"model": options.model, "samples": options.samples, "per_device_eval_batch_size": options.batch}
        content = {**described, "benchmark": name, "task": about, "target": TARGETS.get(options.model)}
        write_json(file, {**content, "results": results})
        print(f"{arm}: {results[arm]['process_s']:.1f} s, {time.perf_counter() - started:.1f} s in all", flush=True)
    for arm in results:
        print(line(arm, results[arm]))


if __name__ == "__main__":
    main()

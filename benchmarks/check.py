"""What `loopwright check` predicts, against a real run: peak memory and time of three models.

python benchmarks/check.py [NAME ...] [--rounds N] [--cpu-time] [--out FILE] prints a table. Each round is a prediction
and a run; the ratio is the median over the rounds. The spread is that of the runs themselves, longest by shortest: no
prediction is closer than the machine repeats itself. Below each model, the parts of the prediction beside the time
ledger of the run. The peak is that of the process, by the system's own count.

With --cpu-time every clock is the processor time of one thread, which other programs on the machine hardly change.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORDS = [f"word{index}" for index in range(900)]
STEPS = {"mlp": 1200, "causal-lm": 80, "text-classification": 80}
PARTS = ("start", "once", "updates", "evaluations", "saves", "end")
"""Parts of the time: until the first update, proving and compiling, updates, ..."""
CPU_TIME = """
import sys, time
base, spent = float(sys.argv.pop(1)), time.process_time
time.perf_counter, time.time = spent, lambda: base + spent()
from loopwright.cli.main import main
sys.exit(main())
"""
"""Runs the command with the processor time in the place of every clock."""
MEASURED = ("peak_predicted", "peak", "seconds_predicted", "seconds")


def measured(
    words: list[str], folder: Path, program: Sequence[str] = ("-m", "loopwright"), *, is_cpu_time: bool = False
) -> tuple[float, int, str]:
    """Seconds, peak bytes and output of a command."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    if is_cpu_time:
        environment["OMP_NUM_THREADS"] = "1"
    started = time.time()
    with open(folder / "output", "w+") as output, open(folder / "errors", "w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *program, *words], cwd=folder, stdout=output, stderr=errors, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = usage.ru_utime + usage.ru_stime if is_cpu_time else time.time() - started
        output.seek(0)
        errors.seek(0)
        text, problem = output.read(), errors.read()[-2000:]
    if status:
        raise SystemExit(f"loopwright {' '.join(words)} failed: {text}{problem}")
    return seconds, usage.ru_maxrss * 1024, text


def compare(name: str, folder: Path, rounds: int = 1, *, is_cpu_time: bool = False) -> dict[str, Any]:
    """The predictions for a model and what its runs take, in turns: medians, ratios and spreads over the rounds."""
    config = MODELS[name](folder)
    found = []
    for number in range(rounds):
        options = {"max_steps": STEPS[name], "use_cpu": True, "save_total_limit": 1, "output_dir": f"out{number}"}
        (folder / "run.json").write_text(json.dumps({**config, **options}))
        found.append(round_of(folder, folder / f"out{number}", is_cpu_time=is_cpu_time))
    return summary(found)


def round_of(folder: Path, output: Path, *, is_cpu_time: bool = False) -> dict[str, Any]:
    """One prediction and the run after it."""
    began = time.time()
    program = ["-c", CPU_TIME, str(began)] if is_cpu_time else ["-m", "loopwright"]
    predicted = json.loads(measured(["check", "run.json", "--json"], folder, program, is_cpu_time=is_cpu_time)[2])
    began = began if is_cpu_time else time.time()
    seconds, peak, _ = measured(["train", "run.json", "--json"], folder, program, is_cpu_time=is_cpu_time)
    return {
        "peak_predicted": predicted["memory"]["peak"],
        "peak": peak,
        "seconds_predicted": predicted["seconds"]["total"],
        "seconds": seconds,
        "predicted": {part: predicted["seconds"][part] for part in PARTS},
        "parts": parts_of(output, began=began, seconds=seconds),
        "speed": predicted["speed"],
        "memory": predicted["memory"],
    }


def parts_of(output: Path, *, began: float, seconds: float) -> dict[str, float]:
    """What a run spent its seconds on, by its time ledger, under the names of the prediction."""
    ledger = json.loads((output / "time_ledger.json").read_text())
    spent = ledger["seconds"]
    parts = {
        "start": ledger["starts"][0]["time"] - began,
        "once": spent["proving"] + spent["compiling"],
        "updates": spent["updates"] + spent["data_wait"],
        "evaluations": spent["evaluation"],
        "saves": spent["saving"],
    }
    return {**parts, "end": seconds - sum(parts.values())}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, the median of their ratios, and the spread of the runs themselves."""
    middle = {name: statistics.median(each[name] for each in rounds) for name in MEASURED}
    seconds, peaks = [each["seconds"] for each in rounds], [each["peak"] for each in rounds]
    return {
        **middle,
        "peak_ratio": statistics.median(each["peak_predicted"] / each["peak"] for each in rounds),
        "peak_spread": max(peaks) / min(peaks),
        "seconds_ratio": statistics.median(each["seconds_predicted"] / each["seconds"] for each in rounds),
        "seconds_spread": max(seconds) / min(seconds),
        "parts": {
            part: [statistics.median(each[side][part] for each in rounds) for side in ("predicted", "parts")]
            for part in PARTS
        },
        "rounds": rounds,
    }


def mlp(folder: Path) -> dict[str, Any]:
    source = random.Random(0)
    rows = [[source.random() for _ in range(9)] for _ in range(2000)]
    lines = [",".join([*"abcdefgh", "target"]), *(",".join(f"{value:.4f}" for value in row) for row in rows)]
    (folder / "data.csv").write_text("\n".join(lines) + "\n")
    model = {"name": "mlp", "options": {"hidden": [2048, 2048, 2048]}}
    return {"task": "table-regression", "model": model, "data": {"train": "data.csv", "validation_share": 0.1}}


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[EOS]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    ).save_pretrained(str(folder))


def _texts(lengths: tuple[int, int], count: int) -> list[str]:
    source = random.Random(0)
    return [" ".join(source.choices(WORDS, k=source.randint(*lengths))) for _ in range(count)]


def causal_lm(folder: Path) -> dict[str, Any]:
    import transformers

    config = transformers.GPT2Config(n_embd=384, n_layer=6, n_head=6, n_positions=256, vocab_size=1024)
    transformers.GPT2LMHeadModel(config).save_pretrained(str(folder / "model"))
    _tokenizer(folder / "model")
    (folder / "data.txt").write_text("\n".join(_texts((100, 100), 600)) + "\n")
    data = {"train": "data.txt", "validation_share": 0.05, "max_length": 128}
    return {"task": "causal-lm", "model": "model", "data": data, "per_device_train_batch_size": 4}


def text_classification(folder: Path) -> dict[str, Any]:
    import transformers

    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536, vocab_size=1024
    )
    transformers.BertForMaskedLM(config).save_pretrained(str(folder / "model"))
    _tokenizer(folder / "model")
    rows = [{"text": text, "label": len(text) % 3} for text in _texts((10, 120), 800)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": "data.jsonl", "validation_share": 0.05}
    return {"task": "text-classification", "model": "model", "data": data, "per_device_train_batch_size": 8}


MODELS = {"mlp": mlp, "causal-lm": causal_lm, "text-classification": text_classification}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *MODELS], metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3, help="predictions and runs of each model, in turns")
    parser.add_argument("--cpu-time", action="store_true", help="measure the processor time of one thread")
    parser.add_argument("--out", type=Path, help="a JSON file for everything that was measured")
    given = parser.parse_args()
    results: dict[str, Any] = {}
    times = "".join(f"{title:>{width}}" for title, width in (("seconds", 12), ("predicted", 12), ("ratio", 8)))
    print(f"{'model':<22}{'peak':>12}{'predicted':>12}{'ratio':>8}{times}{'spread':>8}")
    for name in given.names or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = found = compare(name, Path(folder), given.rounds, is_cpu_time=given.cpu_time)
        print(
            f"{name:<22}{found['peak'] / 2**20:>9.0f} MiB{found['peak_predicted'] / 2**20:>8.0f} MiB"
            f"{found['peak_ratio']:>8.3f}{found['seconds']:>12.1f}{found['seconds_predicted']:>12.1f}"
            f"{found['seconds_ratio']:>8.3f}{found['seconds_spread']:>8.2f}"
        )
        for part, (predicted, seconds) in found["parts"].items():
            print(f"  {part:<52}{seconds:>12.1f}{predicted:>12.1f}", flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

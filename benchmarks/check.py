"""What `loopwright check` predicts, against a real run: peak memory and time of three models.

python benchmarks/check.py [NAME ...] prints a table; the peak is that of the process, by the system's own count.
"""

from __future__ import annotations

import json
import os
import random
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


def measured(
    words: list[str], folder: Path, program: Sequence[str] = ("-m", "loopwright")
) -> tuple[float, int, str]:
    """Seconds, peak bytes and output of a command."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    started = time.time()
    with open(folder / "output", "w+") as output, open(folder / "errors", "w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *program, *words], cwd=folder, stdout=output, stderr=errors, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.time() - started
        output.seek(0)
        errors.seek(0)
        text, problem = output.read(), errors.read()[-2000:]
    if status:
        raise SystemExit(f"loopwright {' '.join(words)} failed: {text}{problem}")
    return seconds, usage.ru_maxrss * 1024, text


def compare(name: str, folder: Path) -> dict[str, float]:
    """The predictions for a model and what a run takes, with their ratios."""
    config = MODELS[name](folder)
    path = folder / "run.json"
    path.write_text(json.dumps({**config, "max_steps": STEPS[name], "use_cpu": True, "save_total_limit": 1}))
    predicted = json.loads(measured(["check", "run.json", "--json"], folder)[2])
    seconds, peak, _ = measured(["train", "run.json", "--json"], folder)
    return {
        "peak_predicted": predicted["memory"]["peak"],
        "peak": peak,
        "peak_ratio": predicted["memory"]["peak"] / peak,
        "seconds_predicted": predicted["seconds"]["total"],
        "seconds": seconds,
        "seconds_ratio": predicted["seconds"]["total"] / seconds,
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
    print(f"{'model':<22}{'peak':>12}{'predicted':>12}{'ratio':>8}{'seconds':>12}{'predicted':>12}{'ratio':>8}")
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            found = compare(name, Path(folder))
        print(
            f"{name:<22}{found['peak'] / 2**20:>9.0f} MiB{found['peak_predicted'] / 2**20:>8.0f} MiB"
            f"{found['peak_ratio']:>8.3f}{found['seconds']:>12.1f}{found['seconds_predicted']:>12.1f}"
            f"{found['seconds_ratio']:>8.3f}"
        )


if __name__ == "__main__":
    main()

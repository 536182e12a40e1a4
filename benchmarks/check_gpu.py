"""What `loopwright check` predicts on a GPU, against a real run: peak memory and time of three models.

python benchmarks/check_gpu.py OUT.json [NAME ...] [--limit SECONDS] [--device cpu]

Each part of the prediction is beside that of the run's time ledger. The file is written again after each model, so that
nothing is lost if the time ends; what does not fit into the limit is left out: last come a model that is compiled, and
a small run from `train` to the report. `--device cpu` tries the script with models of a small size.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from check import PARTS, _texts, _tokenizer, measured, mlp, parts_of
from machine import described

CHILD = """
import json, sys
from loopwright.cli.main import main
code = main(sys.argv[2:])
import torch
peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
open(sys.argv[1], "w").write(json.dumps({"peak": peak}))
sys.exit(code)
"""
"""Runs the command, and writes the peak memory of the GPU."""


def gpt2(folder: Path, *, is_small: bool) -> dict[str, Any]:
    """GPT-2 with 124 million parameters."""
    import transformers

    small = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 1024} if is_small else {}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=512, **small))
    words, count = (60, 300) if is_small else (500, 1500)
    return {**_saved(model, folder), **_language(folder, words=words, count=count)}


def llama(folder: Path, *, is_small: bool) -> dict[str, Any]:
    """A Llama with 156 million parameters, and sequences of other lengths."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=64 if is_small else 1024,
        intermediate_size=128 if is_small else 2816,
        num_hidden_layers=2 if is_small else 12,
        num_attention_heads=8,
        max_position_embeddings=1024,
    )
    model = transformers.LlamaForCausalLM(config)
    words, count = (100, 300) if is_small else (900, 800)
    return {**_saved(model, folder), **_language(folder, words=words, count=count)}


def bert(folder: Path, *, is_small: bool) -> dict[str, Any]:
    """BERT-base, 109 million parameters, and texts of many lengths."""
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**(sizes if is_small else {})))
    texts = _texts((5, 40), 300) if is_small else _texts((20, 400), 3000)
    rows = [{"text": text, "label": len(text) % 3} for text in texts]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": "data.jsonl", "validation_share": 0.05}
    return {**_saved(model, folder), "task": "text-classification", "data": data, "per_device_train_batch_size": 32}


def compiled(folder: Path, *, is_small: bool) -> dict[str, Any]:
    """The Llama, compiled."""
    return {**llama(folder, is_small=is_small), "torch_compile": True}


MODELS = {"gpt2-124m": gpt2, "bert-base": bert, "llama-156m": llama, "llama-156m compiled": compiled}
LAST = "end to end"
WARM_UP = """
import torch, transformers
import loopwright.pt.trainer
device = "cuda" if torch.cuda.is_available() else "cpu"
for kind in (transformers.GPT2Config(n_layer=1), transformers.BertConfig(num_hidden_layers=1)):
    model = transformers.AutoModel.from_config(kind).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with torch.autocast(device, torch.bfloat16):
        states = model(torch.ones(2, 64, dtype=torch.int64, device=device)).last_hidden_state
    states.float().log_softmax(-1).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""
"""Reads libraries and kernels once: the first process of a machine takes longer to start."""


def _saved(model: Any, folder: Path) -> dict[str, Any]:
    model.save_pretrained(str(folder / "model"))
    _tokenizer(folder / "model")
    return {"model": "model"}


def _language(folder: Path, *, words: int, count: int) -> dict[str, Any]:
    (folder / "data.txt").write_text("\n".join(_texts((words, words), count)) + "\n")
    data = {"train": "data.txt", "validation_share": 0.02, "max_length": 1 << (words.bit_length())}
    return {"task": "causal-lm", "data": data, "per_device_train_batch_size": 16}


def config_of(name: str, folder: Path, *, is_small: bool) -> None:
    """Write the configuration of a run."""
    config = MODELS[name](folder, is_small=is_small)
    options = {"max_steps": 20, "use_cpu": True} if is_small else {"max_steps": 150, "bf16": True}
    (folder / "run.json").write_text(json.dumps({**config, **options, "save_total_limit": 1, "output_dir": "out"}))


def compared(name: str, folder: Path, *, is_small: bool) -> dict[str, Any]:
    """The predictions for a model and what a run takes, with their ratios."""
    config_of(name, folder, is_small=is_small)
    checked, _, text = measured(["check", "run.json", "--json"], folder)
    predicted = json.loads(text)
    began = time.time()
    seconds, host, _ = measured(["train", "run.json", "--json"], folder, program=["-c", CHILD, "peak.json"])
    peak = json.loads((folder / "peak.json").read_text())["peak"] or host
    expected, spent = predicted["seconds"], parts_of(folder / "out", began=began, seconds=seconds)
    return {
        "peak_predicted": predicted["memory"]["peak"],
        "peak": peak,
        "peak_ratio": predicted["memory"]["peak"] / peak,
        "seconds_predicted": expected["total"],
        "seconds": seconds,
        "seconds_ratio": expected["total"] / seconds,
        "check_seconds": checked,
        "parts": {part: [expected[part], spent[part]] for part in PARTS},
        "ms_per_step": expected["per_step"] * 1000,
        "memory": predicted["memory"],
        "speed": predicted["speed"],
        "ledger": json.loads((folder / "out/time_ledger.json").read_text())["seconds"],
    }


def end_to_end(folder: Path, *, is_small: bool) -> dict[str, Any]:
    """A small run from the configuration to the report, and the same command again."""
    options = {"max_steps": 40, "save_steps": 20, "output_dir": "out", **({"use_cpu": True} if is_small else {})}
    (folder / "run.json").write_text(json.dumps({**mlp(folder), **options}))
    first = json.loads(measured(["train", "run.json", "--json"], folder)[2])
    again = json.loads(measured(["train", "run.json", "max_steps=60", "--json"], folder)[2])
    record = json.loads((folder / "out/resolved_config.json").read_text())
    return {
        "first": {name: first[name] for name in ("status", "step", "checkpoint")},
        "again": {name: again[name] for name in ("status", "step", "checkpoint")},
        "report": (folder / "out/report.html").is_file(),
        "values_with_source": len(record["values"]),
    }


def show(name: str, found: dict[str, Any]) -> None:
    """Print what was found, by parts."""
    each = found["models"].get(name)
    if each is None:
        print(name, found.get("failed", {}).get(name) or found.get("end_to_end"), flush=True)
        return
    print(
        f"{name}: peak {each['peak_ratio']:.3f} of {each['peak'] / 2**20:,.0f} MiB; time {each['seconds_ratio']:.3f} "
        f"of {each['seconds']:.1f} s; check took {each['check_seconds']:.1f} s"
    )
    for part, (predicted, seconds) in each["parts"].items():
        print(f"  {part:<14}predicted {predicted:>8.2f} s, was {seconds:>8.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(MODELS)}; all if there is none")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds; what would take longer is left out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    is_small, began, longest = given.device == "cpu", time.time(), 0.0
    found: dict[str, Any] = {**described(), "device": given.device, "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        found["warm_up_seconds"] = measured([], Path(folder), program=["-c", WARM_UP])[0]
    for name in given.names or (*MODELS, LAST):
        start = time.time()
        if start - began + longest > given.limit:
            found.setdefault("left_out", []).append(name)
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                if name in MODELS:
                    found["models"][name] = compared(name, Path(folder), is_small=is_small)
                else:
                    found["end_to_end"] = end_to_end(Path(folder), is_small=is_small)
            except (SystemExit, Exception) as error:  # the next model is still measured
                found.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"
        longest = max(longest, (time.time() - start) if name in MODELS else 0.0)
        found["seconds"] = time.time() - began
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        show(name, found)


if __name__ == "__main__":
    main()

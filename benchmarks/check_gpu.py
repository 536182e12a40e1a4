"""What `loopwright check` predicts on a GPU, against a real run: peak memory and time of three models.

python benchmarks/check_gpu.py OUT.json [NAME ...] [--forks] [--steps N] [--limit SECONDS] [--device cpu]

Each part of the prediction is beside that of the run's time ledger. The file is written again after each model, so that
nothing is lost if the time ends; what does not fit into the limit is left out: last come a model that is compiled, and
a small run from `train` to the report. `--device cpu` tries the script with models of a small size.

A first process makes the models and trains each for an epoch of a few samples: on a machine on which nothing ran yet,
whoever comes first reads libraries and kernels from the disk, which would be `check` and not the run.

With --forks, both commands are forks of one process that has imported the libraries, one after the other. On a host
where imports take longer than everything else, three models fit into less than three minutes. The imports are measured
once and added to both sides; the ratio without them is stricter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from check import PARTS, _texts, _tokenizer, measured, mlp, parts_of

CHILD = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from check_gpu import command
sys.exit(command(sys.argv[1:]))
"""
"""Runs a command in a new process; it imports nothing that the command would not import later."""
PEAK, WARM_UP, MACHINE = "peak.json", "warm-up", "machine.json"
HERE = Path(__file__).resolve().parent
Run = Callable[[list[str], Path], tuple[float, int, str]]
"""Runs a command in a folder; returns its seconds, its peak bytes on the host, and its output."""


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
WARMED = ("gpt2-124m", "bert-base", "llama-156m")
"""Models that train before they are measured; code that is compiled would be in the cache then."""
LAST = "end to end"
FEW = 100
"""Samples of the warm-up: all of them are in one epoch, also the one that needs padding."""


def _saved(model: Any, folder: Path) -> dict[str, Any]:
    model.save_pretrained(str(folder / "model"))
    _tokenizer(folder / "model")
    return {"model": "model"}


def _language(folder: Path, *, words: int, count: int) -> dict[str, Any]:
    (folder / "data.txt").write_text("\n".join(_texts((words, words), count)) + "\n")
    data = {"train": "data.txt", "validation_share": 0.02, "max_length": 1 << (words.bit_length())}
    return {"task": "causal-lm", "data": data, "per_device_train_batch_size": 16}


def write_config(name: str, folder: Path, *, steps: int, is_small: bool) -> None:
    """Write the model, the data and the configuration of a run, and a configuration with few samples."""
    folder.mkdir()
    config = MODELS[name](folder, is_small=is_small)
    device = {"use_cpu": True} if is_small else {"bf16": True}
    run = {**config, **device, "max_steps": steps, "save_total_limit": 1, "output_dir": "out"}
    (folder / "run.json").write_text(json.dumps(run))
    data = Path(config["data"]["train"])
    lines = (folder / data).read_text().splitlines(keepends=True)[:FEW]
    (folder / data.with_stem("few")).write_text("".join(lines))
    few = {"data": {**config["data"], "train": str(data.with_stem("few"))}, "save_strategy": "no"}
    epoch = {"num_train_epochs": 1, "output_dir": WARM_UP}
    (folder / "few.json").write_text(json.dumps({**config, **device, **few, **epoch}))


def prepare(folder: Path, names: Sequence[str], *, steps: int, is_small: bool) -> None:
    """Write the configurations, and train with few samples; called in a process of its own."""
    from machine import described

    from loopwright.cli.main import main as loopwright

    for name in names:
        write_config(name, folder / name, steps=steps, is_small=is_small)
    for name in [each for each in names if each in WARMED]:
        os.chdir(folder / name)
        with redirect_stdout(sys.stderr):
            loopwright(["train", "few.json"])
    (folder / MACHINE).write_text(json.dumps(described()))


# ---- running commands ------------------------------------------------------------------------------------------------


def command(words: list[str]) -> int:
    """Run a command of loopwright, and write the peak memory of the GPU; returns the exit code."""
    from loopwright.cli.main import main as loopwright

    code = loopwright(words)
    import torch

    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    Path(PEAK).write_text(json.dumps({"peak": peak}))
    return code


def in_process(words: list[str], folder: Path) -> tuple[float, int, str]:
    """Run a command in a new process."""
    return measured(words, folder, program=["-c", CHILD, str(HERE)])


def in_fork(words: list[str], folder: Path) -> tuple[float, int, str]:
    """Run a command in a fork of this process, which has imported the libraries and not used the GPU."""
    started = time.time()
    child = os.fork()
    if child == 0:
        _be_child(words, folder)
    _, status, usage = os.wait4(child, 0)
    seconds = time.time() - started
    text = (folder / "output").read_text()
    if status:
        raise SystemExit(f"loopwright {' '.join(words)} failed: {text}{(folder / 'errors').read_text()[-2000:]}")
    return seconds, usage.ru_maxrss * 1024, text


def _be_child(words: list[str], folder: Path) -> None:
    code = 1
    try:
        os.chdir(folder)
        for number, name in ((1, "output"), (2, "errors")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        code = command(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def preload() -> float:
    """Import what both commands import, without using the GPU; returns the seconds."""
    started = time.time()
    # Asking the driver itself would make the GPU unusable in forks.
    os.environ.update({"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "HF_HUB_OFFLINE": "1"})
    sys.path.insert(0, str(HERE.parent / "src"))
    import torch
    import transformers

    import loopwright.cli.commands.check
    import loopwright.cli.commands.train
    import loopwright.config.trial
    import loopwright.pt.seq2seq

    assert all(getattr(transformers, f"{name}Model") for name in ("GPT2", "Bert", "Llama"))
    assert loopwright.Trainer
    assert not torch.cuda.is_initialized()
    return time.time() - started


# ---- comparing -------------------------------------------------------------------------------------------------------


def compared(folder: Path, run: Run, imports: float | None) -> dict[str, Any]:
    """The predictions for a model and what a run takes, with their ratios; `imports`: the seconds that forks save."""
    checked, _, text = run(["check", "run.json", "--json"], folder)
    predicted = json.loads(text)
    began = time.time()
    seconds, host, _ = run(["train", "run.json", "--json"], folder)
    peak = json.loads((folder / PEAK).read_text())["peak"] or host
    expected, spent = predicted["seconds"], parts_of(folder / "out", began=began, seconds=seconds)
    return {
        "peak_predicted": predicted["memory"]["peak"],
        "peak": peak,
        "peak_ratio": predicted["memory"]["peak"] / peak,
        **totals(expected, seconds, imports),
        "check_seconds": checked,
        "parts": {part: [expected[part], spent[part]] for part in PARTS},
        "ms_per_step": expected["per_step"] * 1000,
        "memory": predicted["memory"],
        "speed": predicted["speed"],
        "ledger": json.loads((folder / "out/time_ledger.json").read_text())["seconds"],
    }


def totals(expected: dict[str, float], seconds: float, imports: float | None) -> dict[str, float]:
    """The predicted time, that of the run, and their ratio."""
    predicted = expected["total"]
    if imports is None:
        return {"seconds_predicted": predicted, "seconds": seconds, "seconds_ratio": predicted / seconds}
    from loopwright.config.trial import INTERPRETER

    alone = (predicted - INTERPRETER) / seconds  # a fork neither starts nor ends an interpreter
    predicted, seconds = predicted + imports, seconds + INTERPRETER + imports
    return {
        "seconds_predicted": predicted,
        "seconds": seconds,
        "seconds_ratio": predicted / seconds,
        "seconds_ratio_without_imports": alone,
    }


def end_to_end(folder: Path, run: Run, *, is_small: bool) -> dict[str, Any]:
    """A small run from the configuration to the report, and the same command again."""
    folder.mkdir()
    options = {"max_steps": 40, "save_steps": 20, "output_dir": "out", **({"use_cpu": True} if is_small else {})}
    (folder / "run.json").write_text(json.dumps({**mlp(folder), **options}))
    first = json.loads(run(["train", "run.json", "--json"], folder)[2])
    again = json.loads(run(["train", "run.json", "max_steps=60", "--json"], folder)[2])
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
    if "seconds_ratio_without_imports" in each:
        print(f"  time without imports and interpreter {each['seconds_ratio_without_imports']:.3f}")
    for part, (predicted, seconds) in each["parts"].items():
        print(f"  {part:<14}predicted {predicted:>8.2f} s, was {seconds:>8.2f} s", flush=True)


def read_words() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(MODELS)}; all if there is none")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds; what would take longer is left out")
    parser.add_argument("--steps", type=int, help="updates of each run; usually 100, and 20 on a CPU")
    parser.add_argument("--forks", action="store_true", help="commands are forks of a process that has imported all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.is_small = given.device == "cpu"
    given.steps = given.steps or (20 if given.is_small else 100)
    given.names = given.names or [*MODELS, LAST]
    return given


def prepared(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Prepare the runs in a process of its own; returns the machine, and what that took."""
    names = [name for name in given.names if name in MODELS]
    options = ["--prepare", str(folder), "--steps", str(given.steps), "--device", given.device]
    seconds = measured([str(given.out), *names, *options], folder, program=[__file__])[0]
    machine = json.loads((folder / MACHINE).read_text())
    return {**machine, "device": given.device, "steps": given.steps, "warm_up_seconds": seconds, "models": {}}


def measure(name: str, folder: Path, given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measure one model, or the run from end to end; an error is a result too."""
    run = in_fork if given.forks else in_process
    try:
        if name in MODELS:
            found["models"][name] = compared(folder, run, found.get("import_seconds"))
        else:
            found["end_to_end"] = end_to_end(folder, run, is_small=given.is_small)
    except (SystemExit, Exception) as error:  # the next model is still measured
        found.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"


def main() -> None:
    given = read_words()
    if given.prepare is not None:
        prepare(given.prepare, given.names, steps=given.steps, is_small=given.is_small)
        return
    began, longest = time.time(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        found = prepared(given, Path(folder))
        if given.forks:
            found["import_seconds"] = preload()
        for name in given.names:
            start = time.time()
            if start - began + longest > given.limit:
                found.setdefault("left_out", []).append(name)
            else:
                measure(name, Path(folder, name), given, found)
                show(name, found)
                longest = max(longest, time.time() - start)
            found["seconds"] = time.time() - began
            given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

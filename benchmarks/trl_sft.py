"""TRL's SFTTrainer and DPOTrainer on one GPU, on loopwright's Trainer and on transformers': samples per second, memory.

    python benchmarks/trl_sft.py [--model 0.5b] [--trainers sft dpo] [--budget 100] [--json FILE]

The loopwright arm calls `loopwright.compat.install()` before it imports TRL; everything else is the same script, with
TRL's defaults (bf16, gradient checkpointing). Each arm has a process, the same initial weights, texts and order. The
file is written after each arm; an arm may take what the budget leaves, less a few seconds for each that follows.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from arms import Column, Results, Tolerance, default_file, describe, judge, ratio, table, write_json
from processes import Result, child, run_arm

LIBRARIES = ("loopwright", "transformers")
TRAINERS = ("sft", "dpo")
COLUMNS = (
    Column("samples/s", "samples_per_s", "{:,.1f}"),
    Column("ms/update", "ms_per_update", "{:,.1f}"),
    Column("peak GiB", "peak_gib", "{:.1f}"),
    Column("1st update s", "first_update_s", "{:.1f}"),
)
LOGGED = 2
"""Updates between two logged losses."""
LEAST = 15.0
"""Seconds that are left to each arm that follows."""
UPDATES_IN_DATA = {"sft": 40, "dpo": 60}


class NotInstalled(Exception):
    """A package that the arms need is not there."""


# ---- one arm ------------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace, arm: str) -> Result:
    """Train one arm, "TRAINER-LIBRARY", and return its numbers."""
    missing = [name for name in ("trl", "datasets", "accelerate") if find_spec(name) is None]
    if missing:
        raise NotInstalled(f"not installed here: {', '.join(missing)}")
    trainer_name, library = arm.split("-")
    if library == "loopwright":
        import loopwright.compat

        loopwright.compat.install()
    from watch import peak_gib

    watch = _watch(options)
    trainer = {"sft": _sft, "dpo": _dpo}[trainer_name](options, _watching(watch))
    watch.begin()
    trainer.train()
    samples, timed = _samples(options, trainer_name), watch.done - watch.opened
    rows = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    report = trainer.speed_report().as_dict() if hasattr(trainer, "speed_report") else None
    on = [choice["name"] for choice in report["choices"] if choice["on"]] if report else []
    return {
        "status": "ok",
        "note": ", ".join(on),
        "samples_per_s": timed * samples / watch.elapsed,
        "ms_per_update": 1e3 * watch.elapsed / timed,
        "peak_gib": peak_gib(watch.device),
        "first_update_s": watch.first - watch.begun,
        "updates": {"warmup": watch.opened, "timed": timed},
        "losses": rows,
        "speed_report": report,
    }


def _watch(options: argparse.Namespace) -> Any:
    import torch
    from watch import Watch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Watch(device, options.warmup, options.warm_seconds, options.seconds, options.updates)


def _watching(watch: Any) -> Any:
    from transformers import TrainerCallback

    class Watching(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if watch.update_done():
                control.should_training_stop = True

    return Watching()


def _sft(options: argparse.Namespace, watching: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    count = _samples(options, "sft") * UPDATES_IN_DATA["sft"]
    data = Dataset.from_dict({"text": _texts(options, count)})
    args = SFTConfig(**_arguments(options, "sft"), max_length=_longest(options))
    model, tokens = _model(options), _tokenizer(options)
    return SFTTrainer(model, args, train_dataset=data, processing_class=tokens, callbacks=[watching])


def _dpo(options: argparse.Namespace, watching: Any) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    count = _samples(options, "dpo") * UPDATES_IN_DATA["dpo"]
    names = ("prompt", "chosen", "rejected")
    data = Dataset.from_dict({name: _texts(options, count, seed) for seed, name in enumerate(names)})
    args = DPOConfig(**_arguments(options, "dpo"), max_length=_longest(options))
    model, reference, tokens = _model(options), _model(options), _tokenizer(options)
    return DPOTrainer(model, reference, args, train_dataset=data, processing_class=tokens, callbacks=[watching])


def _arguments(options: argparse.Namespace, trainer: str) -> dict[str, Any]:
    import tempfile

    import torch

    micro, accumulation = _shape(options, trainer)
    on_cpu = {} if torch.cuda.is_available() else {"use_cpu": True, "bf16": False}
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 100_000,  # the watch ends the run long before
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "logging_steps": LOGGED,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **on_cpu,
    }


def _shape(options: argparse.Namespace, trainer: str) -> tuple[int, int]:
    """Samples per micro-batch, and micro-batches per update."""
    if options.model == "tiny":
        return (4, 2)
    return (8, 8) if trainer == "sft" else (8, 2)


def _samples(options: argparse.Namespace, trainer: str) -> int:
    micro, accumulation = _shape(options, trainer)
    return micro * accumulation


def _longest(options: argparse.Namespace) -> int:
    return 128 if options.model == "tiny" else 2048


def _model(options: argparse.Namespace) -> Any:
    import torch
    from sft import MODELS

    torch.manual_seed(42)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return MODELS[options.model].build(_longest(options))


def _texts(options: argparse.Namespace, count: int, seed: int = 0) -> list[str]:
    """Texts of log-normal lengths, as words that are one token each."""
    from lengths import SFT, Texts
    from sft import MODELS

    high = _longest(options) // 3  # a prompt and an answer fit together
    lengths = replace(SFT, mean=3.0 if options.model == "tiny" else SFT.mean, high=high)
    texts = Texts("causal", count, lengths, MODELS[options.model].vocabulary, seed=seed, pool=1 << 18)
    return [" ".join(map(str, texts[number]["input_ids"].tolist())) for number in range(count)]


def _tokenizer(options: argparse.Namespace) -> Any:
    from sft import MODELS
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *map(str, range(2, MODELS[options.model].vocabulary))]
    made = Tokenizer(models.WordLevel(dict(zip(words, range(len(words)), strict=True)), unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


# ---- all arms -----------------------------------------------------------------------------------------------------


def main() -> None:
    options = parser().parse_args()
    if options.arm:
        child(options, partial(work, options, options.arm))
        return
    until = time.perf_counter() + options.budget
    arms = [f"{trainer}-{library}" for trainer in options.trainers for library in LIBRARIES]
    print(f"trl: {describe(about(options))}", flush=True)
    results: Results = {}
    for number, arm in enumerate(arms):
        print(f"  {arm} ...", end=" ", flush=True)
        left = until - time.perf_counter() - LEAST * (len(arms) - number - 1)
        result = results[arm] = run_arm(__file__, arm, _words(options), max(left, 1.0))
        said = f"{result['samples_per_s']:,.1f} samples/s" if result["status"] == "ok" else result.get("note", "")
        print(f"{result['status']}: {said}, {result['process_s']:.0f} s in all", flush=True)
        save(options, results)
    for trainer in options.trainers:
        print(f"\n{trainer}\n{table(compared(results, trainer), COLUMNS, 'samples_per_s')}")
    save(options, results)


def _words(options: argparse.Namespace) -> list[str]:
    names = ("model", "warmup", "warm_seconds", "seconds", "updates")
    return [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]


def compared(results: Results, trainer: str) -> Results:
    """The arms of one trainer by library; the one of loopwright is void if its losses are not transformers'."""
    found = {library: results[f"{trainer}-{library}"] for library in LIBRARIES if f"{trainer}-{library}" in results}
    judge(found, Tolerance())
    return found


def save(options: argparse.Namespace, results: Results) -> None:
    """Write everything measured so far."""
    described = next((result["described"] for result in results.values() if "described" in result), {})
    times = {
        trainer: ratio(compared(results, trainer), "samples_per_s", "loopwright", "transformers")
        for trainer in options.trainers
    }
    content = {
        **described,
        "benchmark": "trl",
        "task": about(options),
        "times_transformers": times,
        "results": {arm: {k: v for k, v in each.items() if k != "described"} for arm, each in results.items()},
    }
    write_json(options.json or default_file("trl"), content)


def about(options: argparse.Namespace) -> Result:
    shapes = {trainer: "{} x {}".format(*_shape(options, trainer)) for trainer in options.trainers}
    return {"model": options.model, "samples per update": shapes, "arguments": "TRL's defaults"}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="TRL's SFTTrainer and DPOTrainer on both libraries, on one GPU.")
    parser.add_argument("--model", choices=("0.5b", "tiny"), default="0.5b")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--budget", type=float, default=100.0, help="seconds in all")
    parser.add_argument("--warmup", type=int, default=2, help="updates before the clock starts")
    parser.add_argument("--warm-seconds", type=float, default=0.0, help="the same in seconds after the first")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each arm is timed, at least")
    parser.add_argument("--updates", type=int, default=3, help="how many updates are timed, at least")
    parser.add_argument("--json", type=Path, help="where the numbers go; benchmarks/results/ if not said")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()

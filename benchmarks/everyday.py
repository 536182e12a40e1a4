"""Ten everyday workloads, each by default arguments, by transformers, compiled by transformers, and by a good loop.

    python benchmarks/everyday.py gpt2 vit ... | all  [--arms loopwright hand ...] [--to FILE] [--budget 560]
    python benchmarks/everyday.py gpt2 --arms loopwright hand --profile
    python benchmarks/everyday.py all --tiny

Each arm has a process, a time limit, the same weights, samples, order, batch sizes and updates. Everything comes from
configurations and generated data. FILE is written after every arm and read first if it is there: arms that were
measured before are kept, so that a run can be done in pieces. An arm is void if its losses are not those of the
reference (transformers, otherwise the hand-written loop): each of the first 20 within 1e-2 in bf16 and 1e-4 in fp32,
relative; with dropout the mean over all of them within 3e-2. Milliseconds are the median of the timed updates, MFU is
the necessary work relative to the data sheet and to a bf16 matrix product measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from arms import Column, Results, Target, Tolerance, default_file, judge, ratio, table, verdict_line, write_json
from processes import HERE, POLL_SECONDS, Result, StartedArm, child, end
from update_times import TURNS, Turns

BF16, FP32, DROPOUT = Tolerance(each=1e-2), Tolerance(each=1e-4), Tolerance(mean=3e-2)
ARMS = ("loopwright", "hand", "transformers-compile", "transformers")
"""The one that has to be beaten follows ours; the slowest is last."""
OTHER_ARMS = ("loopwright-compile", "loopwright-max", "loopwright-off", "hand-no-graphs", "hand-eager")
FOREVER = 100_000
LEAST_SECONDS = 15.0
"""With less of the budget left, no other arm is started."""


@dataclass(frozen=True)
class Plan:
    """How one workload is measured."""

    about: str
    warmup: int
    updates: int
    tolerance: Tolerance = BF16
    timeout: float = 100.0
    gib: float = 16.0
    """The most memory that an arm takes, roughly."""
    device: str | None = None
    """Where it runs if no device was named; None for the GPU."""


PLANS = {
    "sft-64": Plan("Llama-like 1.24B, fine-tuning on mixed lengths, 8 x 8 samples", 4, 8, timeout=180.0, gib=80),
    "sft-8": Plan("Llama-like 1.24B, fine-tuning on mixed lengths, 8 samples", 8, 24, timeout=150.0, gib=60),
    "lora": Plan("Llama-like 8B in bf16, LoRA of rank 16, mixed lengths, 4 x 4 samples", 3, 6, timeout=180.0, gib=72),
    "gpt2": Plan("GPT-2 124M, pretraining, 16 x 1,024 tokens, no padding", 12, 30, gib=30),
    "bert": Plan("BERT-base, classification, dropout 0.1, 32 samples of up to 512 tokens", 60, 60, DROPOUT),
    "t5": Plan("T5-v1.1-large, dropout 0.1, 16 x 4 pairs", 14, 8, DROPOUT, timeout=200.0, gib=80),
    "whisper": Plan("Whisper-small, 16 recordings of 30 s", 16, 16, timeout=150.0, gib=28),
    "vit": Plan("ViT-base, 64 images of 224 x 224", 20, 60),
    "convnext": Plan("ConvNeXt-tiny, 64 images of 224 x 224", 20, 60),
    "resnet": Plan("ResNet-50, 64 images of 224 x 224", 20, 60),
    "mlp": Plan("MLP of two layers, 4 vectors of 16, fp32, on the host", 200, 1000, FP32, device="cpu"),
    "custom": Plan("own module of 20 layers, dictionary in and out, 64 x 128 steps", 30, 100),
}
TEN = tuple(name for name in PLANS if name != "resnet")
"""What `all` runs; supervised fine-tuning counts once with two batch sizes."""
TINY_UPDATES = (2, 4)
UNDISTURBED = ("ready_s", "first_update_s", "mfu_matmul", "matmul_tflops")
"""Numbers of an arm that was alone from the beginning."""
MOST_GIB = 132.0
"""Memory of all arms that get ready at the same time."""
OF_COMPILED = 0.6
"""The part of that memory that a model takes that is compiled as a whole."""

COLUMNS = (
    Column("ms/update", "ms_per_update", "{:,.2f}"),
    Column("samples/s", "samples_per_s", "{:,.1f}"),
    Column("tokens/s", "tokens_per_s"),
    Column("MFU %", "mfu", "{:.1f}", 100),
    Column("of matmul %", "mfu_matmul", "{:.1f}", 100),
    Column("peak GiB", "peak_gib", "{:.1f}"),
    Column("1st update s", "first_update_s", "{:.1f}"),
    Column("ready s", "ready_s", "{:.1f}"),
)


def targets(task: str) -> list[Target]:
    """What ours has to reach: the loop, twice transformers, and transformers compiled where it is strong."""
    found = [
        Target("1.0 x the hand-written loop", "rate", 1.0, "hand"),
        Target("2 x transformers", "rate", 2.0, "transformers"),
    ]
    if task in ("gpt2", "vit", "convnext"):
        found.append(Target("1.1 x transformers with torch_compile", "rate", 1.1, "transformers-compile"))
    return [OfLoopwright(**vars(target)) for target in found]


class OfLoopwright(Target):
    """A ratio of the arm that is called loopwright here."""

    def value(self, results: Results) -> float | None:
        return ratio(results, self.key, "loopwright", self.other or "")


# ---- one arm, in its own process ----------------------------------------------------------------------------------


def work(options: argparse.Namespace, arm: str) -> Result:
    """Train one arm and return its numbers."""
    import torch
    from figures import figures
    from kernels import Profiled
    from update_times import UpdateTimes
    from watch import matmul_rate
    from workloads import WORKLOADS

    task_name = options.tasks[0]
    plan = PLANS[task_name]
    device = "cpu" if options.tiny else options.device or plan.device or "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"{task_name} needs a GPU, and torch finds none; --tiny runs on a CPU")
    warmup, updates = counts(options, plan)
    kind = Profiled if options.profile else UpdateTimes
    watch = kind(device, warmup=warmup, seconds=options.seconds, updates=updates)
    rate = matmul_rate(device)
    task = WORKLOADS[task_name](watch, options.tiny)
    task.bf16 = task.bf16 and device == "cuda"
    found = train(arm, task, options)
    if options.profile:
        return {"status": "profiled", "note": found.get("note", ""), "profile": watch.summary()}
    return {"status": "ok", "note": "", **figures(task, rate), **found}


def counts(options: argparse.Namespace, plan: Plan) -> tuple[int, int]:
    """Updates of the warm-up, and timed ones."""
    warmup, updates = TINY_UPDATES if options.tiny else (plan.warmup, plan.updates)
    return options.warmup or warmup, options.updates or updates


def train(arm: str, task: object, options: argparse.Namespace) -> Result:
    from compiled_loop import with_hand
    from trainers import with_loopwright, with_transformers

    backend = "eager" if options.tiny else "inductor"  # tiny tries the scripts, not the compiler
    more = {"dataloader_num_workers": options.workers} if options.workers else {}
    more |= {"max_steps": options.planned}
    compiled = {"torch_compile": True, "torch_compile_backend": backend}
    arms = {
        "loopwright": lambda: with_loopwright(task, **more),
        "loopwright-compile": lambda: with_loopwright(task, torch_compile=True, **more),
        "loopwright-max": lambda: with_loopwright(task, speed="max", **more),
        "loopwright-off": lambda: with_loopwright(task, speed="off", **more),
        "transformers": lambda: with_transformers(task, **more),
        "transformers-compile": lambda: with_transformers(task, **more, **compiled),
        "hand": lambda: with_hand(task, backend=backend),
        "hand-no-graphs": lambda: with_hand(task, backend=backend, graphs=False),
        "hand-eager": lambda: with_hand(task, compiled=False),
    }
    return arms[arm]()


# ---- the parent ---------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> Result:
    """All arms of all tasks, the most important arms first; the file is written after each."""
    file = options.to or default_file("everyday")
    content: Result = json.loads(file.read_text()) if file.exists() else {"benchmark": "everyday", "tasks": {}}
    waiting = [pair for pair in order(options) if options.again or not is_measured(found_in(content, *pair))]
    if options.preload:
        preload()
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(folder)
        running: dict[tuple[str, str], StartedArm] = {}
        until = time.monotonic() + options.budget
        try:
            while waiting or running:
                for pair in [pair for pair, arm in running.items() if arm.is_over()]:
                    arm = running.pop(pair)
                    result = arm.result()
                    turns.leave(arm.process.pid)
                    keep(content, *pair, result, options)
                    write_json(file, content)
                left = until - time.monotonic()
                if waiting and left < LEAST_SECONDS:
                    print(f"the budget of {options.budget:.0f} s is spent before {waiting}", flush=True)
                    waiting = []
                start_fitting(waiting, running, turns, left, options)
                time.sleep(POLL_SECONDS)
        finally:
            for arm in running.values():
                end(arm.process)
    return content


def start_fitting(
    waiting: list[tuple[str, str]],
    running: dict[tuple[str, str], StartedArm],
    turns: Turns,
    left: float,
    options: argparse.Namespace,
) -> None:
    """Start the next arms as long as there is a place and memory for them, and none is timed."""
    for pair in list(waiting):
        used = sum(most_memory(*each) for each in running)
        if len(running) >= options.beside or (running and used + most_memory(*pair) > MOST_GIB):
            continue
        with turns.between() as is_free:
            if not is_free:
                return
            task, arm = pair
            print(f"{task} {arm} ...", flush=True)
            limit = min(options.timeout or PLANS[task].timeout, left)
            shared = {TURNS: str(turns.folder)} if options.beside > 1 else {}
            running[pair] = StartedArm(
                arm, words_for(task, options), limit, options.cache,
                script=__file__, main=main if options.preload else None, more=shared,
            )  # fmt: skip
            turns.enter(running[pair].process.pid)
            waiting.remove(pair)


def most_memory(task: str, arm: str) -> float:
    return PLANS[task].gib * (OF_COMPILED if arm == "hand" else 1.0)


def preload() -> None:
    """Import what arms import, so that they can be forks of this process; the device is not touched."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    sys.path.insert(0, str(HERE.parent / "src"))
    import compiled_loop  # noqa: F401
    import figures  # noqa: F401
    import kernels  # noqa: F401
    import torch
    import transformers
    import workloads  # noqa: F401

    import loopwright

    with suppress(ImportError):
        import peft  # noqa: F401
    for library in (transformers, loopwright):
        assert library.Trainer and library.TrainingArguments
    names = ("Llama", "GPT2", "Bert", "T5", "Whisper", "ViT", "ConvNext", "ResNet")
    assert all(getattr(transformers, f"{name}Model") for name in names)
    assert not torch.cuda.is_initialized()


def found_in(content: Result, task: str, arm: str) -> Result:
    return content["tasks"].get(task, {}).get("results", {}).get(arm, {})


def keep(content: Result, task: str, arm: str, result: Result, options: argparse.Namespace) -> None:
    """Add the result of an arm, print it, and conclude."""
    known = content["tasks"].setdefault(task, {"about": PLANS[task].about, "results": {}})
    if options.beside > 1:  # others were getting ready on the same cores, and used the device for that
        result |= dict.fromkeys(UNDISTURBED) if result.get("status") == "ok" else {}
    print(f"{task} {arm}: {line(result)}, {result['process_s']:.0f} s in all", flush=True)
    if options.profile:
        known.setdefault("profiles", {})[arm] = result
    else:
        known["results"][arm] = result
    conclude(task, known, options)


def is_measured(result: Result) -> bool:
    return result.get("status") in ("ok", "void")


def order(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Arms in turn for all tasks, or all arms of one task after the other, without those that are skipped."""
    if options.by_task:
        pairs = [(task, arm) for task in options.tasks for arm in options.arms]
    else:
        pairs = [(task, arm) for arm in options.arms for task in options.tasks]
    yield from (pair for pair in pairs if ":".join(pair) not in options.skip)


def words_for(task: str, options: argparse.Namespace) -> list[str]:
    """The command line of an arm's process."""
    words = [task, "--seconds", str(options.seconds), "--planned", str(options.planned)]
    for name in ("warmup", "updates", "workers", "device"):
        if getattr(options, name):
            words += [f"--{name}", str(getattr(options, name))]
    return words + ["--tiny"] * options.tiny + ["--profile"] * options.profile


def conclude(task: str, known: Result, options: argparse.Namespace) -> None:
    """Void what differs, and say which targets are met; the machine is kept with the task."""
    results: Results = known["results"]
    for result in [*results.values(), *known.get("profiles", {}).values()]:
        known["described"] = result.pop("described", known.get("described", {}))
    tolerance = FP32 if options.tiny and PLANS[task].tolerance is BF16 else PLANS[task].tolerance
    judge(results, tolerance)
    known["targets"] = [target.verdict(results) for target in targets(task)]


def line(result: Result) -> str:
    if result["status"] == "profiled":
        from kernels import text

        return f"profiled\n{text(result['profile'])}\n"
    if result["status"] != "ok":
        return f"{result['status']}: {result.get('note', '')}\n{result.get('log', '')}".rstrip()
    first, peak = result.get("first_update_s"), result.get("peak_gib")
    after = "" if first is None else f", first after {first:.1f} s, ready after {result['ready_s']:.1f} s"
    memory = "" if peak is None else f", {peak:.1f} GiB"
    return f"{result['ms_per_update']:,.2f} ms per update{after}{memory} ({result.get('note', '')})"


def show(content: Result, tasks: list[str]) -> None:
    for task in tasks:
        known = content["tasks"].get(task, {})
        if known.get("results"):
            print(f"\n{task}: {known['about']}\n{table(known['results'], COLUMNS, 'rate')}")
            print(*map(verdict_line, known["targets"]), sep="\n")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Ten everyday workloads, all arms on the same samples.")
    parser.add_argument("tasks", nargs="+", choices=[*PLANS, "all"], metavar="TASK", help=", ".join([*PLANS, "all"]))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS + OTHER_ARMS)
    parser.add_argument("--skip", nargs="+", default=[], metavar="TASK:ARM", help="arms of tasks that are left out")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the timed updates of an arm may take")
    parser.add_argument("--warmup", type=int, help="updates before the clock starts; the task's own number if not set")
    parser.add_argument("--updates", type=int, help="updates that are timed; the task's own number if not set")
    parser.add_argument("--workers", type=int, default=0, help="loader processes of the trainers; their default is 0")
    parser.add_argument("--planned", type=int, default=FOREVER, help="updates the trainers plan for: max_steps")
    parser.add_argument("--timeout", type=float, help="seconds after which an arm is ended; the task's own if not set")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no other arm begins")
    parser.add_argument("--beside", type=int, default=1, help="arms that get ready at a time; one is timed")
    parser.add_argument("--preload", action="store_true", help="arms are forks of a process that has imported all")
    parser.add_argument("--by-task", action="store_true", help="all arms of a task before the next task")
    parser.add_argument("--again", action="store_true", help="measure again what the file already has")
    parser.add_argument("--cache", type=Path, help="a folder for compiled code, kept between runs; cold if not set")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU, in seconds")
    parser.add_argument("--profile", action="store_true", help="kernels and idle time of a few updates, no timing")
    parser.add_argument("--to", type=Path, help="where the numbers go; benchmarks/results/ if not set")
    parser.add_argument("--arm", choices=ARMS + OTHER_ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    return parser


def main(words: list[str] | None = None) -> None:
    options = parser().parse_args(words)
    if options.arm:
        child(options, lambda: work(options, options.arm))
        return
    if "all" in options.tasks:
        options.tasks = list(TEN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the arm's process too
    show(measure(options), options.tasks)


if __name__ == "__main__":
    main()

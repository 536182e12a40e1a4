"""What padding costs on a CPU: a tiny Llama and a tiny BERT on mixed lengths, 32 samples per update, fp32.

    python benchmarks/layouts.py [--cases llama-8x4 ...] [--arms ours transformers ...] [--rounds 3] [--cpu-time]
                                 [--bf16] [--json FILE]

Arms take turns in every round, each in a process of its own, and the ratio of a round is taken within it: on a busy
machine only ratios mean something. With `--cpu-time` seconds are those of the arm's own threads, which other processes
disturb least. Losses have to be transformers' to 1e-5, with `--bf16` (autocast) to 5e-3. Lengths have the shape of
the mixed set (log-normal, sigma 1) at an eighth of its size, so that the share of padding is the same and a run takes
seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arms import (
    ARMS,
    CHOICES,
    COLUMNS,
    SAMPLES,
    TOKENS,
    Results,
    Target,
    Tolerance,
    default_file,
    describe,
    judge,
    table,
    verdict_line,
    write_json,
)  # fmt: skip
from lengths import MIXED_EIGHTH, Texts
from processes import Result, Worker, described_here, serve

MODELS = ("llama", "bert")
SPLITS = {"8x4": (8, 4), "32x1": (32, 1)}
CASES = [f"{model}-{split}" for model in MODELS for split in SPLITS]
VOCABULARY, WIDTH, INNER, LAYERS, HEADS = 512, 128, 256, 2, 4
SAMPLES_PER_UPDATE = 32
TIMED, WARMUP = 4, 1
SHOWN = (SAMPLES, TOKENS, *COLUMNS[2:4])
CLOCKS = {False: time.perf_counter, True: time.process_time}
TOLERANCES = {False: Tolerance(each=1e-5), True: Tolerance(each=5e-3)}
TARGETS = [Target("3.5 x transformers' samples/s", "samples_per_s", 3.5, "transformers")]


def shape(model: str) -> Any:
    """The model's size, from the benchmark of its large sister."""
    import bert
    import sft

    if model == "llama":
        return sft.Shape(WIDTH, INNER, LAYERS, HEADS, HEADS // 2, WIDTH // HEADS, VOCABULARY)
    return bert.Shape(WIDTH, INNER, LAYERS, HEADS, VOCABULARY)


def work(case: str, arm: str, options: argparse.Namespace) -> Result:
    """One run of one arm on one case."""
    from trainers import Task, run
    from watch import Watch

    model, split = case.split("-")
    size, (micro, accumulation) = shape(model), SPLITS[split]
    kind = "causal" if model == "llama" else "class"
    task = Task(
        build=size.build if model == "llama" else lambda: size.build(dropout=0.0),
        data=Texts(kind, 64 * SAMPLES_PER_UPDATE, MIXED_EIGHTH, VOCABULARY, pool=1 << 16),
        operations=size.operations,
        watch=Watch("cpu", warmup=options.warmup, updates=options.updates, clock=CLOCKS[options.cpu_time]),
        micro=micro,
        accumulation=accumulation,
        bf16=options.bf16,
        counts_items=model == "llama",
        grouped_updates=4 * options.updates,  # its sampler sorts a quarter of them: as many as are timed
    )
    return run(arm, task)


def answer(request: Any, options: argparse.Namespace) -> Result:
    """A worker's answer: a case is trained; without one it says where it runs, which also loads its library."""
    import torch

    torch.set_num_threads(options.threads)
    case = request["case"]
    return work(case, options.arm, options) if case else {"status": "ok", "described": described_here()}


def take_turns(case: str, workers: dict[str, Worker], rounds: int, timeout: float) -> Results:
    """Every arm once per round; the median of each number, and of each round's ratio to transformers."""
    answers: dict[str, list[Result]] = {arm: [] for arm in workers}
    for _ in range(rounds):
        for arm, worker in workers.items():
            if all(each["status"] == "ok" for each in answers[arm]):
                answers[arm].append(worker.ask({"case": case}, timeout))
    return {arm: combined(arm, answers) for arm in workers}


def combined(arm: str, answers: dict[str, list[Result]]) -> Result:
    """One result out of the rounds of an arm; the first failure is the arm's."""
    mine = answers[arm]
    bad = next((each for each in mine if each["status"] != "ok"), None)
    if bad is not None:
        return bad
    result = dict(mine[0])
    for key in ("samples_per_s", "tokens_per_s", "ms_per_update", "first_update_s", "ready_s"):
        result[key] = statistics.median(each[key] for each in mine)
    result["rounds"] = [each["samples_per_s"] for each in mine]
    theirs = [each.get("samples_per_s") for each in answers.get("transformers", [])]
    if len(theirs) == len(mine) and all(theirs):
        ratios = [rate / other for rate, other in zip(result["rounds"], theirs, strict=True)]
        result["times"] = {"transformers": statistics.median(ratios)}
    return result


def measure(options: argparse.Namespace, words: list[str]) -> Result:
    """All cases, one process per arm for the whole of it."""
    os.environ["LOOPWRIGHT_KEPT_PLANS"] = "off"  # every round is a first run
    workers = {arm: Worker(__file__, arm, words) for arm in options.arms}
    content: Result = {"benchmark": "layouts", "task": about(options), "cases": {}, "targets": {}}
    try:
        for worker in workers.values():
            content = {**worker.ask({"case": None}, options.timeout).get("described", {}), **content}
        for case in options.cases:
            results = take_turns(case, workers, options.rounds, options.timeout)
            judge(results, TOLERANCES[options.bf16])
            verdicts = [target.verdict(results) for target in TARGETS]
            content["cases"][case], content["targets"][case] = results, verdicts
            print(f"\n{case}\n{table(results, SHOWN, 'samples_per_s')}", flush=True)
            print(*map(verdict_line, verdicts), sep="\n", flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    write_json(options.json or default_file("layouts"), content)
    return content


def about(options: argparse.Namespace) -> Result:
    precision = "fp32 + bf16 autocast" if options.bf16 else "fp32"
    return {
        "models": f"{LAYERS} layers of {WIDTH}, vocabulary {VOCABULARY}, dropout 0, {precision}",
        "samples per update": SAMPLES_PER_UPDATE,
        "lengths": asdict(MIXED_EIGHTH),
        "seconds": "CPU time of the arm's process" if options.cpu_time else "wall time",
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Tiny models on mixed lengths on a CPU, all arms in turns.")
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=CHOICES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=TIMED, help="timed updates of each run")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="updates before them, which also prove and plan")
    parser.add_argument("--cpu-time", action="store_true", help="time of the arm's own threads instead of the wall's")
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast in every arm")
    parser.add_argument("--threads", type=int, default=1, help="of every arm; one depends least on the other load")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a run is given up")
    parser.add_argument("--json", type=Path, help="where the numbers go; benchmarks/results/ if not said")
    parser.add_argument("--arm", choices=CHOICES, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    import sys

    options = parser().parse_args()
    if options.arm:
        serve(lambda request: answer(request, options))
        return
    print(f"layouts: {describe(about(options))}", flush=True)
    measure(options, sys.argv[1:])


if __name__ == "__main__":
    main()

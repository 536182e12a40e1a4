"""What the speed benchmarks share: their options, a judge for loss curves, a table, targets and the JSON file.

The parent never touches the device: an arm has it to itself, and its memory goes back with its process. An arm whose
losses differ from the reference's is void: how fast something else was trained does not matter.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from processes import HERE, Result, child, plain, run_arm

ARMS = ("ours", "transformers", "transformers-best", "lightning", "loop")
CHOICES = ("ours", "ours-off", "ours-max", "transformers-wide", *ARMS[1:])
REFERENCES = ("transformers", "hand", "loop", "ours-off")
"""Whose losses the others are held against: the first of these that ran."""

Results = dict[str, Result]


# ---- the judge ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tolerance:
    """How far losses may be from the reference's, relative to them."""

    each: float = 2e-2
    """Every one of the first `updates`; bf16 rounds differently in every layout."""
    level: float = 5e-2
    """Their mean, where samples come in another order."""
    mean: float | None = None
    """Their mean instead of each, where dropout makes curves agree in distribution only."""
    updates: int = 20


def difference(losses: list[float], reference: list[float], tolerance: Tolerance, *, reordered: bool) -> Result:
    """How far a curve is from the reference, how far it may be, and over how many updates both were seen."""
    count = min(len(losses), len(reference))
    if tolerance.mean is None and not reordered:
        count = min(count, tolerance.updates)
    mine, theirs = ([float(loss) for loss in each[:count]] for each in (losses, reference))
    if not count or not all(map(math.isfinite, mine)):
        return {"updates": count, "difference": math.inf, "allowed": 0.0}
    if reordered:
        last = max(count // 4, 1)
        return {"updates": count, "difference": _apart(mine[-last:], theirs[-last:]), "allowed": tolerance.level}
    if tolerance.mean is not None:
        return {"updates": count, "difference": _apart(mine, theirs), "allowed": tolerance.mean}
    worst = max(_apart([a], [b]) for a, b in zip(mine, theirs, strict=True))
    return {"updates": count, "difference": worst, "allowed": tolerance.each}


def _apart(mine: list[float], theirs: list[float]) -> float:
    return abs(sum(mine) - sum(theirs)) / max(abs(sum(theirs)), 1e-12)


def judge(results: Results, tolerance: Tolerance) -> None:
    """Void the arms whose losses are not the reference's; their numbers stay in the file, marked."""
    against = next((arm for arm in REFERENCES if results.get(arm, {}).get("status") in ("ok", "void")), None)
    for arm, result in results.items():
        if result.get("status") not in ("ok", "void") or against in (None, arm):
            continue
        reordered = bool(result.get("reordered"))
        found = difference(result["losses"], results[against]["losses"], tolerance, reordered=reordered)
        result["curve"] = {"against": against, **found}
        # Written so that NaN is void too.
        result["status"] = "ok" if found["difference"] <= found["allowed"] else "void"
        if result["status"] == "void":
            what = f"losses differ by {found['difference']:.2g} from {against}, {found['allowed']:.2g} is allowed"
            result["void"] = what


# ---- table and targets --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One number of the table."""

    title: str
    key: str
    form: str = "{:,.0f}"
    scale: float = 1.0

    def text(self, result: Result) -> str:
        value = result.get(self.key)
        return "-" if not isinstance(value, (int, float)) else self.form.format(value * self.scale)


TOKENS = Column("useful tok/s", "tokens_per_s")
SAMPLES = Column("samples/s", "samples_per_s", "{:,.1f}")
COLUMNS = (
    TOKENS,
    SAMPLES,
    Column("ms/update", "ms_per_update", "{:,.1f}"),
    Column("real/computed", "useful_share", "{:.2f}"),
    Column("MFU %", "mfu", "{:.1f}", 100),
    Column("peak GiB", "peak_gib", "{:.1f}"),
    Column("1st update s", "first_update_s", "{:.1f}"),
    Column("ready s", "ready_s", "{:.1f}"),
)


def table(results: Results, columns: Iterable[Column] = COLUMNS, key: str = "tokens_per_s") -> str:
    """One line per arm; an arm that did not finish or is void says so instead of numbers."""
    columns = list(columns)
    rows = [["arm", *(column.title for column in columns), "x transformers", ""]]
    for arm, result in results.items():
        if result.get("status") == "ok":
            times = ratio(results, key, arm, "transformers")
            texts = [column.text(result) for column in columns]
            rows.append([arm, *texts, "-" if times is None else f"{times:.2f}", result.get("note", "")])
        else:
            said = result.get("void") or result.get("note", "")
            rows.append([arm, *[""] * (len(columns) + 1), f"{result.get('status', 'failed')}: {said}"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns) + 2)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(t.rjust(w) for t, w in zip(row[1:-1], widths[1:], strict=True)), row[-1]])
        .rstrip()
        for row in rows
    )  # fmt: skip


def ratio(results: Results, key: str, arm: str, other: str) -> float | None:
    """How many times the other's number an arm reached, if both count."""
    values = [results.get(each, {}) for each in (arm, other)]
    if any(value.get("status") != "ok" or not value.get(key) for value in values):
        return None
    if other in values[0].get("times", {}):  # arms took turns: the median of the rounds, each with its own ratio
        return values[0]["times"][other]
    return values[0][key] / values[1][key]


@dataclass(frozen=True)
class Target:
    """A number that ours has to reach: its own, or its ratio to another arm."""

    text: str
    key: str
    threshold: float
    other: str | None = None
    at_most: bool = False

    def value(self, results: Results) -> float | None:
        if self.other is not None:
            return ratio(results, self.key, "ours", self.other)
        ours = results.get("ours", {})
        return ours.get(self.key) if ours.get("status") == "ok" else None

    def verdict(self, results: Results) -> Result:
        value = self.value(results)
        met = None if value is None else (value <= self.threshold if self.at_most else value >= self.threshold)
        return {"target": self.text, "threshold": self.threshold, "value": value, "met": met}


def verdict_line(verdict: Result) -> str:
    value = "not measured" if verdict["value"] is None else f"{verdict['value']:.4g}"
    word = {True: "met", False: "MISSED", None: "-"}[verdict["met"]]
    return f"{word:<7} {verdict['target']}: {value}"


# ---- the whole ----------------------------------------------------------------------------------------------------


@dataclass
class Benchmark:
    """One command: its name, what its arms train, what it compares."""

    name: str
    script: str
    work: Callable[[argparse.Namespace, str], Result]
    """Runs one arm under these options, in the arm's own process."""
    about: Callable[[argparse.Namespace], Result]
    """What was trained, for the file and the heading."""
    tolerance: Callable[[argparse.Namespace], Tolerance] = lambda options: Tolerance()
    targets: Callable[[argparse.Namespace], list[Target]] = lambda options: []
    columns: tuple[Column, ...] = COLUMNS
    key: str = "tokens_per_s"
    afterwards: Callable[[argparse.Namespace, list[str], Results], Iterator[Result]] = lambda *told: iter(())
    """More to measure once the arms are done, with processes of its own: what is known so far, again and again."""
    results: Results = field(default_factory=dict)


def add_options(
    parser: argparse.ArgumentParser, *, warmup: int, warm_seconds: float, seconds: float, updates: int, timeout: float
) -> None:
    """The options of every GPU benchmark, with the defaults of this one."""
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=CHOICES)
    parser.add_argument("--warmup", type=int, default=warmup, help="updates before the clock starts, at least")
    parser.add_argument("--warm-seconds", type=float, default=warm_seconds, help="the same in seconds after the first")
    parser.add_argument("--seconds", type=float, default=seconds, help="how long each arm is timed, at least")
    parser.add_argument("--updates", type=int, default=updates, help="how many updates are timed, at least")
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds after which an arm is given up")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="where the numbers go; benchmarks/results/ if not said")
    parser.add_argument("--arm", choices=CHOICES, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)


def main(benchmark: Benchmark, parser: argparse.ArgumentParser, words: list[str] | None = None) -> Result | None:
    """The parent runs every arm and prints; a child runs one."""
    words = sys.argv[1:] if words is None else words
    options = parser.parse_args(words)
    if options.arm:
        child(options, lambda: benchmark.work(options, options.arm))
        return None
    print(f"{benchmark.name}: {describe(benchmark.about(options))}", flush=True)
    for arm in options.arms:
        print(f"  {arm} ...", end=" ", flush=True)
        result = benchmark.results[arm] = run_arm(benchmark.script, arm, words, options.timeout)
        print(f"{benchmark_line(result)}, {result['process_s']:.0f} s in all", flush=True)
        save(benchmark, options)
    judge(benchmark.results, benchmark.tolerance(options))
    more: Result = {}
    for more in benchmark.afterwards(options, words, benchmark.results):
        save(benchmark, options, more)
    print(f"\n{table(benchmark.results, benchmark.columns, benchmark.key)}\n")
    for verdict in verdicts(benchmark, options):
        print(verdict_line(verdict))
    return save(benchmark, options, more)


def describe(about: Result) -> str:
    return ", ".join(f"{name} {value}" for name, value in about.items())


def benchmark_line(result: Result) -> str:
    if result["status"] != "ok":
        return f"{result['status']}: {result.get('note', '')}\n{result.get('log', '')}".rstrip()
    return f"{result['tokens_per_s']:,.0f} useful tokens/s, {result['ms_per_update']:,.1f} ms per update"


def verdicts(benchmark: Benchmark, options: argparse.Namespace) -> list[Result]:
    return [target.verdict(benchmark.results) for target in benchmark.targets(options)]


def save(benchmark: Benchmark, options: argparse.Namespace, more: Result | None = None) -> Result:
    """Write everything measured so far: a run that is cut off leaves what it had."""
    results = {arm: {k: v for k, v in result.items() if k != "described"} for arm, result in benchmark.results.items()}
    described = next((result["described"] for result in benchmark.results.values() if "described" in result), {})
    told = {name: value for name, value in vars(options).items() if name not in ("json", "arm", "into")}
    content = {
        **described,
        "benchmark": benchmark.name,
        "task": benchmark.about(options),
        "options": told,
        "targets": verdicts(benchmark, options),
        "results": results,
        **(more or {}),
    }
    write_json(options.json or default_file(benchmark.name), content)
    return content


def default_file(name: str) -> Path:
    return HERE / "results" / f"{name}-{time.strftime('%Y-%m-%d')}.json"


def write_json(file: Path, content: Result) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(plain(content), indent=1, default=str) + "\n")

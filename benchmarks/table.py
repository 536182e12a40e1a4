"""Writes the tables of docs/performance.md from the JSON files in benchmarks/results/.

    python benchmarks/table.py [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. With --check nothing is written, and the exit
code is 1 if the page is not what the files say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "performance.md"
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
NOT_MEASURED = "Not measured yet.\n"

Result = dict[str, Any]
SFT_ARMS = {
    "ours": "**loopwright**",
    "transformers": "transformers, 8 x 8",
    "transformers-best": "transformers, Liger, grouped by length, 8 x 8 (another sample order)",
    "transformers-wide": "transformers, Liger, grouped by length, 16 x 4 (another sample order)",
    "lightning": "Lightning, 8 x 8",
    "loop": "hand-written loop, 8 x 8",
}
SFT_VARIANTS = {
    "prompts without targets": "sft-1.24b-64-masked",
    "bf16 weights": "sft-1.24b-64-bf16",
    "0.5B (24 layers of 896, 151,936 classes)": "sft-0.5b-64",
    "1.7B (28 layers of 2,048, 151,936 classes)": "sft-1.7b-64",
}
EVERYDAY_ARMS = {
    "loopwright": "loopwright",
    "hand": "hand-written compiled loop",
    "transformers-compile": "transformers, torch_compile",
    "transformers": "transformers",
}


# ---- reading ------------------------------------------------------------------------------------------------------


def newest(folder: Path, name: str) -> Result:
    """The latest file of a benchmark; empty if there is none."""
    files = sorted(folder.glob(f"{name}-20??-??-??.json"))
    return json.loads(files[-1].read_text()) if files else {}


def everyday_tasks(folder: Path) -> dict[str, Result]:
    """The tasks of all files of the everyday benchmark; of several files, the latest that compares arms of a task."""
    tasks: dict[str, Result] = {}
    for file in sorted(folder.glob("everyday-*.json")):
        for name, known in json.loads(file.read_text())["tasks"].items():
            if name not in tasks or compares(known) or not compares(tasks[name]):
                tasks[name] = known
    return tasks


def compares(known: Result) -> bool:
    """Whether loopwright and another arm of a task count."""
    counted = [arm for arm in EVERYDAY_ARMS if known["results"].get(arm, {}).get("status") == "ok"]
    return "loopwright" in counted and len(counted) > 1


def number(result: Result, key: str, form: str = "{:,.0f}", scale: float = 1.0) -> str:
    """A number of an arm that counts; otherwise why there is none."""
    if result.get("status", "not measured") != "ok":
        return str(result.get("status", "-"))
    value = result.get(key)
    return "-" if not isinstance(value, (int, float)) else form.format(value * scale)


def times(results: dict[str, Result], key: str, arm: str, other: str) -> str:
    mine, its = (results.get(each, {}) for each in (arm, other))
    if "ok" != mine.get("status") or "ok" != its.get("status"):
        return "-"
    ratio = mine.get("times", {}).get(other) or mine[key] / its[key]
    return f"{ratio:.2f}"


def rows(*lines: Iterable[str]) -> str:
    """A Markdown table; the first line are its titles."""
    cells = [list(line) for line in lines]
    cells.insert(1, ["---"] * len(cells[0]))
    return "".join(f"| {' | '.join(line)} |\n".replace("| --- ", "|---").replace("--- |", "---|") for line in cells)


# ---- tables -------------------------------------------------------------------------------------------------------


def sft(folder: Path, *, samples: int, arms: dict[str, str]) -> str:
    """Supervised fine-tuning, one row per arm."""
    results = newest(folder, f"sft-1.24b-{samples}").get("results", {})
    title = f"{samples} samples per update"
    titles = [title, "useful tokens/s", "ms per update", "real / computed", "MFU", "peak GiB", "ready after s", "ratio"]
    lines = [
        [
            label,
            number(results[arm], "tokens_per_s"),
            number(results[arm], "ms_per_update"),
            number(results[arm], "useful_share", "{:.2f}"),
            number(results[arm], "mfu", "{:.1f} %", 100),
            number(results[arm], "peak_gib", "{:.1f}"),
            number(results[arm], "ready_s", "{:.1f}"),
            times(results, "tokens_per_s", arm, "transformers"),
        ]
        for arm, label in arms.items()
        if arm in results
    ]
    return rows(titles, *lines) if lines else NOT_MEASURED


def sft_variants(folder: Path) -> str:
    titles = ["the same with", "loopwright", "MFU", "peak GiB", "ready after s", "transformers", "peak GiB", "ratio"]
    lines = []
    for label, name in SFT_VARIANTS.items():
        results = newest(folder, name).get("results", {})
        mine, its = results.get("ours", {}), results.get("transformers", {})
        lines.append([
            label,
            number(mine, "tokens_per_s"),
            number(mine, "mfu", "{:.1f} %", 100),
            number(mine, "peak_gib", "{:.1f}"),
            number(mine, "ready_s", "{:.1f}"),
            number(its, "tokens_per_s"),
            number(its, "peak_gib", "{:.1f}"),
            times(results, "tokens_per_s", "ours", "transformers"),
        ])  # fmt: skip
    return rows(titles, *lines)


def everyday(folder: Path) -> str:
    """Milliseconds per update of each workload and arm, ratios, and MFU by both measures."""
    titles = [
        "workload", *(f"{label}, ms" for label in EVERYDAY_ARMS.values()), "x loop", "x compiled", "x transformers",
        "MFU", "of matmul",
    ]  # fmt: skip
    lines = []
    for name, known in everyday_tasks(folder).items():
        results = known["results"]
        mine = results.get("loopwright", {})
        digits = "{:,.2f}" if mine.get("ms_per_update", 1.0) < 1.0 else "{:,.1f}"
        lines.append([
            f"`{name}`: {known['about']}",
            *(number(results.get(arm, {}), "ms_per_update", digits) for arm in EVERYDAY_ARMS),
            *(times(results, "rate", "loopwright", arm) for arm in EVERYDAY_ARMS if arm != "loopwright"),
            number(mine, "mfu", "{:.1f} %", 100),
            number(mine, "mfu_matmul", "{:.1f} %", 100),
        ])  # fmt: skip
    return rows(titles, *lines) if lines else NOT_MEASURED


def everyday_memory(folder: Path) -> str:
    """Peak memory of each workload and arm, that of loopwright as measured last, and seconds to ready."""
    both = [f"{label}, {what}" for what in ("GiB", "ready s") for label in EVERYDAY_ARMS.values()]
    keys, peaks = ("peak_gib", "ready_s"), latest_peaks(folder)
    lines = []
    for name, known in everyday_tasks(folder).items():
        results = dict(known["results"])
        if name in peaks:
            results["loopwright"] = {**results["loopwright"], "peak_gib": peaks[name]}
        numbers = (number(results.get(arm, {}), key, "{:.1f}") for key in keys for arm in EVERYDAY_ARMS)
        lines.append([f"`{name}`", *numbers])
    return rows(["workload", *both], *lines) if lines else NOT_MEASURED


def latest_peaks(folder: Path) -> dict[str, float]:
    """The peak memory of loopwright by workload, also from runs without other arms; of one day, those are first."""
    found: dict[str, float] = {}
    files = [*folder.glob("peaks-20??-??-??.json"), *folder.glob("everyday-20??-??-??*.json")]
    for file in sorted(files, key=lambda file: (file.stem.partition("-")[2][:10], file.stem[:1] != "p", file.stem)):
        content = json.loads(file.read_text())
        found |= content.get("peak_gib", {})
        for name, known in content.get("tasks", {}).items():
            peak = known["results"].get("loopwright", {}).get("peak_gib")
            found |= {} if peak is None else {name: peak}
    return found


def layouts(folder: Path) -> str:
    """Samples per second of mixed lengths on a CPU, relative to transformers."""
    arms = {"ours": "loopwright", "transformers-best": "transformers, grouped by length", "lightning": "Lightning"}
    arms["loop"] = "hand-written loop"
    models = {"llama": "Llama", "bert": "BERT"}
    lines = []
    for case, results in newest(folder, "layouts").get("cases", {}).items():
        model, split = case.split("-")
        label = f"{models[model]}, {split.replace('x', ' x ')}"
        lines.append([label, *(times(results, "samples_per_s", arm, "transformers") for arm in arms)])
    return rows(["case", *arms.values()], *lines) if lines else NOT_MEASURED


def overhead(folder: Path) -> str:
    """Function calls of one update."""
    arms = {"loopwright": "loopwright", "loop": "hand-written loop", "transformers": "transformers"}
    arms["lightning"] = "Lightning"
    found = newest(folder, "overhead").get("results", {})
    lines = [
        [f"`{model}`", *(f"{results[arm]['calls']:,.0f}" if arm in results else "-" for arm in arms)]
        for model, results in found.items()
    ]
    return rows(["calls per update", *arms.values()], *lines) if lines else NOT_MEASURED


TABLES: dict[str, Callable[[Path], str]] = {
    "sft-64": partial(sft, samples=64, arms=SFT_ARMS),
    "sft-variants": sft_variants,
    "sft-8": partial(sft, samples=8, arms={"ours": "**loopwright**", "transformers": "transformers"}),
    "everyday": everyday,
    "everyday-memory": everyday_memory,
    "layouts": layouts,
    "overhead": overhead,
}


# ---- the page -----------------------------------------------------------------------------------------------------


def rendered(page: str, folder: Path = RESULTS) -> str:
    """The page with every marked table written again."""
    return MARKED.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]](folder)}\n{mark[3]}", page)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the tables of docs/performance.md from the measured numbers.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is stale")
    options = parser.parse_args(words)
    before = PAGE.read_text()
    after = rendered(before)
    if options.check and after != before:
        print("docs/performance.md is not what benchmarks/results/ says; run python benchmarks/table.py")
        return 1
    if after != before:
        PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`loopwright dryrun`: compile a trainer's whole step for TPUs without a TPU, and report whether it fits."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import ArgumentsError
from ...xla.topologies import EXAMPLES, check_packages, read_topology

MAKER = "make_trainer"
GIB, MIB = 2**30, 2**20
TEXT = """Compile the whole training step of a trainer (forward, loss, backward, AdamW) for TPU chips, without a TPU,
and report the memory it needs on each chip. TARGET names a function without arguments that returns the Trainer, as
FILE.py:function or package.module:function; the default function is make_trainer. The trainer's batch size is per
chip, and weights are replicated on all chips. Nothing is computed and nothing runs on a TPU."""


def run(words: list[str]) -> int:
    """Compile for each topology and print the results; returns 0 if the step fits on all of them."""
    parser = argparse.ArgumentParser(prog="loopwright dryrun", description=TEXT)
    parser.add_argument("target", metavar="TARGET", help=f"FILE.py[:{MAKER}] or package.module[:{MAKER}]")
    parser.add_argument(
        "--topology", metavar="NAME", nargs="+", action="extend",
        help=f"chips to compile for, such as {', '.join(EXAMPLES.values())}; several are possible "
        f"(default: {EXAMPLES['v5e']})",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="print JSON, or write it to a file")
    options = parser.parse_args(words)
    topologies = [read_topology(name) for name in options.topology or [EXAMPLES["v5e"]]]
    make = find_maker(options.target)
    check_packages()
    report = {"loopwright": __version__, "target": options.target, **_look_at(make(), topologies)}
    print(json.dumps(report) if options.json == "-" else text_of(report))
    if options.json not in (None, "-"):
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if all(each["fits"] for each in report["topologies"]) else 1


def find_maker(target: str) -> Any:
    """The function named by a target."""
    place, _, name = target.partition(":")
    name = name or MAKER
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ArgumentsError(f"there is no file {place!r} in {os.getcwd()}")
        sys.path.insert(0, str(Path(place).resolve().parent))
        names = runpy.run_path(place, run_name="loopwright_dryrun")  # code for __main__ does not run
    else:
        names = _names_of(place)
    if not callable(names.get(name)):
        raise ArgumentsError(
            f"{place} has no function {name}(); define one that returns your Trainer, without training"
        )
    return names[name]


def _names_of(module: str) -> dict[str, Any]:
    sys.path.insert(0, os.getcwd())
    try:
        return vars(import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports is missing
        raise ArgumentsError(f"there is no module {module!r}; name a function as FILE.py:{MAKER}") from error


def _look_at(trainer: Any, topologies: list[Any]) -> dict[str, Any]:
    from ...pt.trainer import Trainer
    from ...xla import dryrun

    if not isinstance(trainer, Trainer):
        raise ArgumentsError(f"the function returned {type(trainer).__name__}; it must return a loopwright.Trainer")
    return dryrun.dry_run(trainer, topologies)


def text_of(report: dict[str, Any]) -> str:
    """The report as text."""
    batch = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in report["batch"].items())
    size = f"{report['parameters']:,} parameters, {report['trained']:,} of them trained"
    lines = [
        f"{report['model']}: {size}, in {report['precision']}",
        f"batch per chip: {batch}",
        "compiled only: nothing ran on a TPU",
        *(f"note: {note}" for note in report["notes"]),
    ]
    for each in report["topologies"]:
        lines += ["", f"{each['topology']}: {each['chips']} chips, compiled in {each['seconds']:.1f} s; each chip:"]
        lines += _given_up(each) if "error" in each else _contents(each)
    return "\n".join(lines)


def _contents(each: dict[str, Any]) -> list[str]:
    rows = {
        "arguments": f"{_size(each['argument_bytes'])}  weights, AdamW state, batch",
        "temporaries": f"{_size(each['temporary_bytes'])}  gradients, activations",
        "program": f"{_size(each['program_bytes'] + each['result_bytes'])}  instructions, results",
        "total": f"{_size(each['total_bytes'])}  of {each['hbm_bytes'] / GIB:.0f} GiB: "
        + (f"fits ({each['total_bytes'] / each['hbm_bytes']:.0%})" if each["fits"] else "DOES NOT FIT"),
        "operations": "unknown" if each["operations"] is None else f"{each['operations'] / 1e9:,.1f} billion a step",
        "collectives": ", ".join(f"{count} {name}" for name, count in each["collectives"].items()) or "none",
    }
    return [f"  {name:12} {value}" for name, value in rows.items()]


def _given_up(each: dict[str, Any]) -> list[str]:
    words = (each["error"].strip().splitlines() or ["no message"])[0]
    if not each["too_large"]:
        return [f"  the compiler failed: {words}"]
    return [f"  DOES NOT FIT in {each['hbm_bytes'] / GIB:.0f} GiB of chip memory: {words}"]


def _size(count: int) -> str:
    return f"{count / GIB:8.2f} GiB" if count >= GIB else f"{count / MIB:8.2f} MiB"

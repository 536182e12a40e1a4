"""What real trackers have stored of a run: `python read_back.py FOLDER` prints {tracker: [[name, step, value], ...]}.

Started with the Python that has the trackers. Each tracker's own file, database or archive is read, and the names are
those that loopwright reports (train/loss).
"""

from __future__ import annotations

import csv
import json
import sqlite3
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Value = tuple[str, int, Any]
STEPS = 8


def trackio(folder: Path) -> Iterator[Value]:
    database = sqlite3.connect(folder / "trackio" / "project.db")
    for step, metrics in database.execute("select step, metrics from metrics"):
        yield from ((name, step, value) for name, value in json.loads(metrics).items())


def mlflow(folder: Path) -> Iterator[Value]:
    database = sqlite3.connect(folder / "mlflow.db")
    yield from database.execute("select key, step, value from metrics")


def wandb(folder: Path) -> Iterator[Value]:
    from loopwright.reporters.wandb import STEP, records_of

    summary: dict[str, Any] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records_of(file):
            if record["type"] == "history":
                item = record["history"]["item"]
                yield from ((name, item[STEP], value) for name, value in item.items())
            elif record["type"] == "summary":
                summary.update(record["summary"].get("update", {}))
    yield from ((f"train/{name}", STEPS, value) for name, value in summary.items() if "/" not in name)


def swanlab(folder: Path) -> Iterator[Value]:
    from loopwright.reporters.swanlab import scalars_of

    for file in sorted(folder.glob("swanlab/run-*/*.swanlab")):
        yield from ((name, step, None) for name, step in scalars_of(file))


def comet_ml(folder: Path) -> Iterator[Value]:
    for path in sorted(folder.glob("comet/*.zip")):
        archive = zipfile.ZipFile(path)
        for name in archive.namelist():
            if name.endswith("messages.json"):
                for line in map(json.loads, archive.read(name).splitlines()):
                    metric = line["payload"].get("metric") or {}
                    if line["type"] == "metric_msg" and metric.get("step") is not None:
                        yield metric["metricName"], metric["step"], metric["metricValue"]


def clearml(folder: Path) -> Iterator[Value]:
    from loopwright.reporters.clearml import events_of

    for session in sorted(folder.glob("clearml/offline/offline-*/")):
        for event in events_of(session):
            if event["metric"] == "Summary":
                yield f"train/{event['variant']}", STEPS, event["value"]
            elif event["metric"] in ("train", "eval"):
                yield f"{event['metric']}/{event['variant']}", event["iter"], event["value"]


def dvclive(folder: Path) -> Iterator[Value]:
    metrics = folder / "dvclive" / "plots" / "metrics"
    for file in metrics.rglob("*.tsv"):
        name = file.relative_to(metrics).with_suffix("").as_posix()
        for line in csv.DictReader(file.open(newline=""), delimiter="\t"):
            yield name, int(line["step"]), float(line[file.stem])


def is_logged(name: str) -> bool:
    """Whether a value is of loopwright; packages add measurements of the machine."""
    return name.startswith(("train/", "eval/")) and not name.startswith("train/_")


READERS = {each.__name__: each for each in (trackio, mlflow, wandb, swanlab, comet_ml, clearml, dvclive)}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    found = {tracker: list(READERS[tracker](place)) for tracker in sys.argv[2].split(",")}
    kept = {name: [row for row in rows if name == "mlflow" or is_logged(row[0])] for name, rows in found.items()}
    print(json.dumps(kept))

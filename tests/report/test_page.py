"""report.html as a file: its size, what it holds, what it never replaces; `report`, `compare` and `--json`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loopwright.cli.main import main
from loopwright.report.data_file import BEGINNING, END
from loopwright.report.document import document
from loopwright.report.folder import open_run
from loopwright.report.page import page
from loopwright.report.series import MOST_POINTS

from .folders import write_rows, write_run


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())
    assert found is not None
    return json.loads(found.group(1))


def test_a_page_without_data_is_small_and_names_no_server() -> None:
    text = page(document([]), follows=True)
    assert len(text.encode()) <= 150_000
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
    assert addresses == {"https://github.com/leeoniya/uPlot"}, "only the origin of uPlot, in a comment"
    assert "The MIT License" in text and "src=" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)


def test_a_long_run_has_two_thousand_points_a_curve(tmp_path: Path) -> None:
    write_run(tmp_path, 5_000, every=1)
    run = document([open_run(tmp_path).read()])["runs"][0]
    assert max(len(curve["x"]) for curve in run["curves"].values()) <= MOST_POINTS
    assert len(run["curves"]["loss"]["x"]) > MOST_POINTS / 2


def test_curves_beyond_the_limit_are_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 500, **{f"metric_{number}": 1.0 for number in range(100)}}) + "\n")
    found = document([open_run(tmp_path).read()])
    assert len(found["charts"]) == 60 and len(found["charts"]) + len(found["left_out"]) == 110


def test_names_and_texts_cannot_become_tags(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<script>alert(1)<&@@DATA@@")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 500, "</script><img src=x>": 1.0, "text": "</script><script>bad()"}) + "\n")
    assert main(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text()
    assert "<img" not in text and "bad()" in text and text.count("</script>") == 3
    assert data_of(folder / "report.html")["runs"][0]["name"] == folder.name


def test_report_writes_the_page_and_prints_its_path(tmp_path: Path, capsys: Any) -> None:
    folder = write_run(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    run = data_of(folder / "report.html")["runs"][0]
    assert run["verdict"].startswith("Step 300: loss or gradients were not finite, first in layers.3.mlp")
    assert run["findings"][0].startswith("62% of the time waited for data")
    assert sum(row["seconds"] for row in run["ledger"]) == pytest.approx(run["wall"])
    assert {mark["kind"] for mark in run["marks"]} == {"resume", "incident"}
    assert run["texts"][0]["text"].startswith("Once upon") and run["command"] == "train.py --lr 5e-5"
    assert {"name": "learning_rate", "value": "5e-05", "source": "run.yaml:3"} in run["config"]
    assert run["speed_plan"] == [
        {"name": "padding-free rows", "on": True, "reason": "31% padding", "proof": "loss 1e-07"}
    ]
    text = (folder / "report.data.js").read_text()
    assert text.startswith(BEGINNING) and text.endswith(END)
    assert not list(folder.glob(".*.writing"))


def test_compare_shows_a_loss_that_is_no_number(tmp_path: Path, capsys: Any) -> None:
    for name, loss in (("a", 0.5), ("b", "NaN")):
        write_rows(tmp_path / name, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": loss}])
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["loss (last)"] == [0.5, "NaN"]


def test_two_runs_share_a_page(tmp_path: Path, capsys: Any) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", shift=1.0)
    assert main(["report", str(one), str(two), "--output", "both.html"]) == 0
    assert [run["name"] for run in data_of(Path("both.html"))["runs"]] == ["one", "two"]
    assert main(["report", str(one), "--json"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "both.html" and json.loads(printed[1])["runs"][0]["step"] == 500


def test_a_file_of_the_user_is_not_replaced(tmp_path: Path, capsys: Any) -> None:
    folder = write_run(tmp_path / "run")
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    assert main(["report", str(folder), "-o", str(mine)]) == 1
    assert mine.read_text() == "mine" and "is not a report of loopwright" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "compare", "watch"])
def test_a_folder_without_a_run_is_one_clear_line(tmp_path: Path, capsys: Any, command: str) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "missing"):
        words = [str(folder)] * (2 if command == "compare" else 1)
        assert main([command, *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and str(folder) in error and "pass the output_dir of a run" in error


def test_compare_shows_results_time_and_what_differs(tmp_path: Path, capsys: Any) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", shift=1.0)
    assert main(["compare", str(one), str(two)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^eval_loss \(lowest\) +0\.7311 +1\.731$", text, re.MULTILINE)
    assert re.search(r"^Waiting for data +0:20:40 +0:20:40$", text, re.MULTILINE)
    assert (
        re.search(r"^seed +42 +43$", text, re.MULTILINE)
        and "learning_rate  " not in text.split("arguments that differ")[1]
    )
    assert main(["compare", str(one), str(two), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["arguments"] == {"seed": ["42", "43"]}
    assert main(["compare", str(one)]) == 2
    assert "compare needs two runs or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"seconds": 3}', b'{"seconds": {"updates": "NaN"}}', b"\xff\xfe"]
)
def test_damaged_files_beside_the_metrics_do_not_matter(tmp_path: Path, content: bytes) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("time_ledger.json", "run.json", "speed_plan.json", "resolved_config.json", "report.data.js"):
        (folder / name).write_bytes(content)
    assert main(["report", str(folder)]) == 0
    run = data_of(folder / "report.html")["runs"][0]
    assert run["status"] == "unknown" and run["curves"]["loss"]["x"][-1] == 500


def test_two_processes_may_write_the_same_page(tmp_path: Path) -> None:
    """As when `loopwright report` is called while the run writes its own."""
    folder = write_run(tmp_path / "run")
    code = f"import sys; from loopwright.cli.main import main; [main(['report', {str(folder)!r}]) for _ in range(15)]"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) for _ in range(2)]
    while any(process.poll() is None for process in processes):
        if (folder / "report.html").exists():
            assert data_of(folder / "report.html")["runs"][0]["step"] == 500
    assert [process.returncode for process in processes] == [0, 0]
    assert not list(folder.glob(".*.writing"))

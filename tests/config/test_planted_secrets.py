"""`loopwright train` writes and prints none of the secrets that a configuration or a command line holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopwright.cli.main import main
from tests.tasks.cases import write_config

SECRET = "Zq7pV0n9TtR4sXyK2bLm"
URL = f"https://me:{SECRET}@host/x"


def config(folder: Path) -> Path:
    return write_config(
        folder, "table-regression", output_dir=str(folder / "run"), save_steps=2, hub_token=SECRET, run_name=URL,
        project=f"hf_{SECRET}", report_to=["tensorboard"],
    )  # fmt: skip


def test_no_file_and_no_output_of_a_run_holds_a_secret(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, run = str(config(tmp_path)), str(tmp_path / "run")
    assert main(["train", path, f"hub_token={SECRET}"]) == 0
    for words in (["explain", path, "--json"], ["explain", path], ["report", run], ["compare", run, run]):
        assert main(words) == 0, words
    files = [each for each in (tmp_path / "run").rglob("*") if each.is_file()]
    names = {each.name for each in files}
    assert {"resolved_config.json", "report.html", "report.data.js", "time_ledger.json", "run.json"} <= names
    assert any(name.startswith("events.out") for name in names)
    assert not [each for each in files if SECRET.encode() in each.read_bytes()]
    assert SECRET not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "word",
    [f"data.train={URL}.csv", f"max_steps=hf_{SECRET}", f"model=https://host/m?token={SECRET}", f"metrics=[{URL}]",
     f"resume_from_checkpoint=s3://me:{SECRET}@bucket/run", f"output_dir=nothing://me:{SECRET}@host/run"],
)  # fmt: skip
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_no_error_shows_a_secret(
    form: list[str], word: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config(tmp_path)), word, *form]) in (1, 2)
    said = capfd.readouterr()
    assert SECRET not in said.out + said.err and "<masked>" in said.err

"""The record of how a run was started, written by several processes into one folder."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from loopwright.core.resuming.run_record import FILE, read_record, write_record


def test_machines_that_share_a_folder_do_not_take_each_others_files(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for written in [pool.submit(write_record, tmp_path) for _ in range(200)]:
            written.result()
    assert read_record(tmp_path) is not None
    assert [each.name for each in tmp_path.iterdir()] == [FILE]


def test_tokens_do_not_reach_run_json(tmp_path: Path) -> None:
    code = f"from loopwright.core.resuming.run_record import write_record; write_record({str(tmp_path)!r})"
    words = ["--hub_token", "hf_SECRET", "--api-key=SECRET", "--steps", "3"]
    subprocess.run([sys.executable, "-c", code, *words], check=True, timeout=60)
    text = (tmp_path / "run.json").read_text()
    assert "SECRET" not in text and "--steps" in json.loads(text)["argv"]

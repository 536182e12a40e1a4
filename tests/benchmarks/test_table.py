"""The tables of docs/performance.md are those of the measured files."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # scripts, not a package
table = import_module("table")

PAGE = "before\n<!-- table: everyday -->\n\n| old |\n\n<!-- end of table -->\nafter\n"


def arm(milliseconds: float, **more: object) -> dict[str, object]:
    return {"status": "ok", "ms_per_update": milliseconds, "rate": 1e3 / milliseconds, "mfu": 0.301, **more}


def write(folder: Path, name: str, **results: object) -> None:
    content = {"tasks": {"gpt2": {"about": "GPT-2", "results": results}}}
    (folder / name).write_text(json.dumps(content))


def test_the_page_is_what_the_files_say() -> None:
    assert table.main(["--check"]) == 0


def test_every_table_of_the_page_has_a_writer_and_the_other_way_round() -> None:
    assert sorted(name for _, name, _ in table.MARKED.findall(table.PAGE.read_text())) == sorted(table.TABLES)


def test_the_latest_numbers_are_shown_with_their_ratios(tmp_path: Path) -> None:
    write(tmp_path, "everyday-2026-01-01.json", loopwright=arm(90.0))
    write(tmp_path, "everyday-2026-01-02.json", loopwright=arm(40.0), hand=arm(50.0), transformers=arm(100.0))
    page = table.rendered(PAGE, tmp_path)
    assert "| `gpt2`: GPT-2 | 40.0 | 50.0 | - | 100.0 | 1.25 | - | 2.50 | 30.1 % | - |" in page
    assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page
    assert table.rendered(page, tmp_path) == page


def test_numbers_without_any_to_compare_them_with_replace_none_that_have_some(tmp_path: Path) -> None:
    write(tmp_path, "everyday-2026-01-01.json", loopwright=arm(40.0), transformers=arm(100.0))
    write(tmp_path, "everyday-2026-01-02.json", loopwright=arm(20.0))
    assert "| 40.0 | - | - | 100.0 |" in table.rendered(PAGE, tmp_path)


def test_the_peak_memory_of_loopwright_is_the_latest_of_all_files(tmp_path: Path) -> None:
    write(tmp_path, "everyday-2026-01-01.json", loopwright=arm(40.0, peak_gib=9.0), hand=arm(50.0, peak_gib=8.0))
    assert "| `gpt2` | 9.0 | 8.0 |" in table.everyday_memory(tmp_path)
    (tmp_path / "peaks-2026-01-02.json").write_text(json.dumps({"peak_gib": {"gpt2": 7.0}}))
    assert "| `gpt2` | 7.0 | 8.0 |" in table.everyday_memory(tmp_path)
    write(tmp_path, "everyday-2026-01-02.json", loopwright=arm(40.0, peak_gib=6.0))
    assert "| `gpt2` | 6.0 | 8.0 |" in table.everyday_memory(tmp_path)
    write(tmp_path, "everyday-2026-01-02b.json", loopwright=arm(40.0, peak_gib=5.0))
    assert "| `gpt2` | 5.0 | 8.0 |" in table.everyday_memory(tmp_path)


def test_a_void_arm_has_no_number_and_no_ratio(tmp_path: Path) -> None:
    write(tmp_path, "everyday-2026-01-01.json", loopwright=arm(40.0), hand={**arm(10.0), "status": "void"})
    page = table.rendered(PAGE, tmp_path)
    assert "| 40.0 | void | - | - | - | - | - | 30.1 % |" in page


def test_a_stale_page_is_found(tmp_path: Path, monkeypatch) -> None:
    page = tmp_path / "performance.md"
    page.write_text(PAGE)
    monkeypatch.setattr(table, "PAGE", page)
    assert table.main(["--check"]) == 1 and page.read_text() == PAGE
    assert table.main([]) == 0 and table.main(["--check"]) == 0

"""The table of supported versions: one row for each environment, as it was measured."""

from __future__ import annotations

import json

from . import matrix


def test_every_environment_has_a_row_and_none_failed():
    rows = json.loads(matrix.RESULTS.read_text())
    assert [row["name"] for row in rows] == [each.name for each in matrix.ENVIRONMENTS]
    assert [row for row in rows if row["result"].startswith("failed")] == []


def test_the_page_shows_the_stored_results():
    assert matrix.PAGE.read_text() == matrix.page(json.loads(matrix.RESULTS.read_text())), (
        "python tests/versions/matrix.py --page"
    )


def test_the_tests_of_an_environment_exist():
    paths = {path for each in matrix.ENVIRONMENTS for path in each.tests}
    assert [path for path in sorted(paths) if not (matrix.ROOT / path).exists()] == []


def test_the_result_is_read_from_the_last_line_of_pytest():
    assert matrix.outcome(0, "...\n12 passed, 3 skipped in 4.0s\n") == "passed: 12 tests, 3 skipped"
    assert matrix.outcome(1, "2 failed, 10 passed in 4.0s") == "failed: 2 of 12 tests"
    assert matrix.outcome(2, "1 error in 4.0s").startswith("failed")
    assert matrix.outcome(5, "no tests ran in 0.1s").startswith("failed")
    assert matrix.outcome(124, "").startswith("failed")


def test_a_python_that_is_not_here_is_none():
    assert matrix.interpreter("3.99") is None


def test_the_newest_version_is_compared_by_number():
    rows = [{"torch": version, "result": "passed: 1 tests"} for version in ("2.9.1", "2.13.0+cpu", "2.10.0")]
    assert matrix.range_row("torch", rows) == "| torch | 2.9.1 | 2.13.0+cpu |"

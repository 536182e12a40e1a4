"""What always runs of a large grid."""

from __future__ import annotations

import pytest

from tests.spreads import some, spread


@pytest.mark.parametrize("sizes", [(4,), (3, 2), (2, 5), (3, 3, 3), (1, 4, 2)], ids=str)
def test_every_choice_of_a_spread_comes_once_at_least(sizes: tuple[int, ...]) -> None:
    cases = spread(*(range(size) for size in sizes))
    always = [case.values for case in cases if not case.marks]
    assert len({case.values for case in cases}) == len(cases) and len(always) == max(sizes)
    for place, size in enumerate(sizes):
        assert {values[place] for values in always} == set(range(size))


def test_each_of_some_steps_always_runs() -> None:
    cases = some([("a", 1), ("b", 2), ("c", 3)], step=2)
    assert [case.values for case in cases if not case.marks] == [("a", 1), ("c", 3)] and len(cases) == 3

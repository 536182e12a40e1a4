"""Calling a user's method with what it accepts, and refusing overrides that are never called."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from loopwright.core.internals import Internals
from loopwright.core.trainer import BaseTrainer
from loopwright.core.user_code.overrides import (
    NEVER_CALLED,
    accepts,
    adapt,
    is_overridden,
    names_parameter,
    reaches_ours,
    refuse_dead_overrides,
)
from loopwright.errors import OverrideError


def two(a: Any, b: Any) -> Any:
    return (a, b)


def optional(a: Any, b: Any, extra: Any = None) -> Any:
    return (a, b, extra)


def anything(a: Any, b: Any, **kwargs: Any) -> Any:
    return (a, b, kwargs)


def keyword_only(a: Any, b: Any, *, extra: Any) -> Any:
    return (a, b, extra)


class Callable:
    def __call__(self, a: Any, b: Any) -> Any:
        return (a, b)

    def method(self, a: Any, b: Any, extra: Any = 0) -> Any:
        return (a, b, extra)


CASES = [
    (two, (1, 2)),
    (optional, (1, 2, 5)),
    (anything, (1, 2, {"extra": 5, "more": 6})),
    (keyword_only, (1, 2, 5)),
    (Callable(), (1, 2)),
    (Callable().method, (1, 2, 5)),
    (functools.partial(two, 1), None),
    (lambda a, b, more: (a, b, more), (1, 2, 6)),
]


@pytest.mark.parametrize(("function", "expected"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_a_function_gets_the_optional_arguments_it_takes(function: Any, expected: Any) -> None:
    adapted = adapt(function, "extra", "more")
    if expected is None:
        assert adapted(2, extra=5, more=6) == (1, 2)
    else:
        assert adapted(1, 2, extra=5, more=6) == expected


def test_a_function_that_takes_everything_is_left_alone() -> None:
    assert adapt(anything, "extra") is anything and adapt(optional, "extra") is optional


def test_arguments_that_are_not_optional_are_passed_in_any_case() -> None:
    with pytest.raises(TypeError):
        adapt(two, "extra")(1, 2, another=3)


def test_naming_and_accepting_differ() -> None:
    assert accepts(anything, "extra") and not names_parameter(anything, "extra")
    assert accepts(optional, "extra") and names_parameter(optional, "extra")
    assert not accepts(two, "extra")
    assert not accepts(dict.fromkeys, "extra")


@pytest.mark.parametrize("name", NEVER_CALLED)
def test_an_override_nobody_would_call_is_refused(name: str) -> None:
    cls = type("Mine", (BaseTrainer,), {name: lambda self: None})
    with pytest.raises(OverrideError, match=f"Mine overrides {name}.*Override instead: "):
        refuse_dead_overrides(cls, BaseTrainer)


def test_overridden_means_by_the_user() -> None:
    class Mine(Internals):
        def log(self, *args: Any) -> None: ...

    mine = Mine.__new__(Mine)
    assert is_overridden(mine, "log") and not is_overridden(mine, "save_state")
    mine.save_state = lambda *args: None  # type: ignore[method-assign]
    assert is_overridden(mine, "save_state")


def test_an_override_that_goes_on_to_ours_is_told_from_one_that_does_not() -> None:
    class Goes(Internals):
        def log(self, *args: Any) -> None:
            super().log(*args)

    class Stops(Internals):
        def log(self, *args: Any) -> None: ...

    class GoesToStops(Stops):
        def log(self, *args: Any) -> None:
            Stops.log(self, *args)

    class Between(Goes):
        """Overrides nothing."""

    def bare(cls: type) -> Any:
        return cls.__new__(cls)

    assert reaches_ours(bare(Goes), "log") and reaches_ours(bare(Between), "log")
    assert not reaches_ours(bare(Stops), "log") and not reaches_ours(bare(GoesToStops), "log")
    assert reaches_ours(bare(Internals), "log")
    mine = bare(Goes)
    mine.log = functools.partial(print)
    assert not reaches_ours(mine, "log")
    mine.log = lambda *args: Goes.log(mine, *args)
    assert reaches_ours(mine, "log")


def test_a_function_that_has_changed_is_read_anew() -> None:
    def one(a: int) -> None: ...

    def two(a: int, b: int) -> None: ...

    assert not accepts(one, "b")
    one.__code__ = two.__code__
    assert accepts(one, "b")
    one.__wrapped__ = lambda c: None  # type: ignore[attr-defined]
    assert accepts(one, "c") and not accepts(one, "b")

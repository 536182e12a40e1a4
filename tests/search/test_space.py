"""Spaces: what a dict means, and what is wrong with it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from loopwright.errors import ArgumentsError
from loopwright.search.space import DEFAULT, read_space
from loopwright.search.trials import KnownTrial, RandomTrial


def test_every_kind_gives_values_within_its_bounds() -> None:
    space = read_space(
        {
            "a": {"uniform": [0, 0.5]},
            "b": {"log_uniform": ["1e-6", "1e-3"]},
            "c": {"int_uniform": [1, 3]},
            "d": {"log_int_uniform": [1, 1000]},
            "e": [True, "x", 3],
            "f": {"choice": [8]},
            "g": {"grid": [None, 2]},
        }
    )
    drawn = [space(RandomTrial(number, seed=0)) for number in range(200)]
    assert all(0 <= each["a"] <= 0.5 and 1e-6 <= each["b"] <= 1e-3 and each["f"] == 8 for each in drawn)
    assert {each["c"] for each in drawn} == {1, 2, 3} and {type(each["d"]) for each in drawn} == {int}
    assert {each["e"] for each in drawn} == {True, "x", 3} and {each["g"] for each in drawn} == {None, 2}
    assert 50 < sum(math.log10(each["b"]) < -4.5 for each in drawn) < 150  # by its logarithm
    assert 60 < sum(each["d"] < 32 for each in drawn) < 140


def test_a_trial_has_the_same_values_when_it_is_resumed() -> None:
    assert DEFAULT(RandomTrial(3, seed=1)) == DEFAULT(RandomTrial(3, seed=1)) != DEFAULT(RandomTrial(4, seed=1))


def test_a_name_has_one_value_in_a_trial() -> None:
    trial = RandomTrial(0, seed=0)
    assert trial.suggest_float("x", 0, 1) == trial.suggest_float("x", 0, 1) == trial.params["x"]


def test_steps_are_honoured() -> None:
    values = {RandomTrial(number, seed=0).suggest_float("x", 0, 1, step=0.25) for number in range(100)}
    assert values == {0, 0.25, 0.5, 0.75, 1}
    assert {RandomTrial(number, seed=0).suggest_int("x", 2, 8, step=3) for number in range(60)} == {2, 5, 8}


def test_a_grid_has_every_combination() -> None:
    space = read_space({"a": [1, 2], "b": {"grid": ["x", "y", "z"]}})
    assert space.size == 6 == len(space.grid())
    assert space.grid()[:2] == [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}]
    assert read_space({"a": {"uniform": [0, 1]}}).size is None
    with pytest.raises(ArgumentsError, match="a grid needs a list of values for a"):
        read_space({"a": {"uniform": [0, 1]}}).grid()


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (5, "neither a list of values"),
        ({}, "neither a list of values"),
        ({"uniform": [0, 1], "choice": [1]}, "neither a list of values"),
        ([], "at least one value"),
        ([1, 1], "twice"),
        ([[1], [2]], "a list or a dict among"),
        ({"choice": 3}, "not a list"),
        ({"log_unifrom": [1, 2]}, "did you mean 'log_uniform'"),
        ({"uniform": [1]}, "needs two bounds"),
        ({"uniform": [2, 1]}, "must be below"),
        ({"uniform": ["x", 1]}, "'x' is not a finite number"),
        ({"uniform": [True, 2]}, "not a finite number"),
        ({"uniform": [0, math.inf]}, "not a finite number"),
        ({"log_uniform": [0, 1]}, "begins above 0"),
        ({"int_uniform": [0.5, 3]}, "integers as bounds"),
    ],
)
def test_a_bad_part_is_named(part: Any, problem: str) -> None:
    with pytest.raises(ArgumentsError, match="learning_rate: .*") as caught:
        read_space({"learning_rate": part, "seed": [1, 2]})
    assert problem in str(caught.value)


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(ArgumentsError) as caught:
        read_space({"a": 1, "b": [], "c": [1]})
    assert len(caught.value.problems) == 2
    with pytest.raises(ArgumentsError, match="a dict of arguments"):
        read_space([])


def test_a_known_trial_requests_only_what_it_does_not_have() -> None:
    requests = []

    def request(*given: Any, **options: Any) -> float:
        requests.append((given, options))
        return 0.5

    trial = KnownTrial(2, {"learning_rate": 0.1}, request)
    assert trial.suggest_float("learning_rate", 0, 1) == 0.1 and not requests
    assert trial.suggest_float("dropout", 0, 1) == 0.5 == trial.params["dropout"]
    assert requests == [(("suggest_float", "dropout", 0, 1), {"step": None, "log": False})]
    with pytest.raises(ArgumentsError, match="model_init suggests 'dropout'.*let hp_space"):
        KnownTrial(2, {}).suggest_categorical("dropout", [1])

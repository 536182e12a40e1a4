"""The enums: same members as transformers', and errors that help."""

from __future__ import annotations

from enum import Enum

import pytest

from loopwright.args import names
from loopwright.args.base import BaseArguments
from loopwright.args.names import IntervalStrategy, Name, OptimizerNames, SchedulerType

EXTRA = {"OptimizerNames": {"ADAMW_APEX_FUSED": "adamw_apex_fused", "MUON": "muon"}}
ENUMS = [value for value in vars(names).values() if isinstance(value, type) and issubclass(value, Name)][1:]


def counterpart(name: str) -> type[Enum]:
    pytest.importorskip("transformers")
    from transformers import debug_utils, trainer_utils, training_args

    return next(getattr(home, name) for home in (trainer_utils, training_args, debug_utils) if hasattr(home, name))


@pytest.mark.parametrize("enum", dict.fromkeys(ENUMS), ids=lambda enum: enum.__name__)
def test_members_are_those_of_transformers(enum):
    theirs = {member.name: member.value for member in counterpart(enum.__name__)}
    ours = {member.name: member.value for member in enum}
    assert ours == {**theirs, **EXTRA.get(enum.__name__, {})}


@pytest.mark.parametrize("enum", dict.fromkeys(ENUMS), ids=lambda enum: enum.__name__)
def test_members_of_transformers_are_accepted(enum):
    assert [enum(member).value for member in counterpart(enum.__name__)] == [
        member.value for member in counterpart(enum.__name__)
    ]


def test_an_enum_that_is_no_string_is_accepted_by_its_value():
    assert IntervalStrategy(Enum("Other", {"STEPS": "steps"}).STEPS) is IntervalStrategy.STEPS


def test_an_invalid_value_lists_the_valid_ones_and_the_nearest():
    with pytest.raises(ValueError, match="'stps' is not one of no, steps, epoch; did you mean 'steps'"):
        IntervalStrategy("stps")


def test_members_behave_as_their_text():
    assert f"{SchedulerType.COSINE}" == "cosine" == SchedulerType.COSINE
    assert {"muon": 1}[OptimizerNames.MUON] == 1


@pytest.mark.parametrize("field", ["eval_strategy", "save_strategy", "optim", "lr_scheduler_type", "hub_strategy"])
def test_arguments_take_members_of_transformers(field):
    ours = getattr(BaseArguments(), field)
    theirs = counterpart(type(ours).__name__)(ours.value)
    given = getattr(BaseArguments(**{field: theirs}), field)
    assert given is ours


def test_the_old_name_of_the_interval_enum_remains():
    assert names.EvaluationStrategy is IntervalStrategy

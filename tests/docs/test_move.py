"""The tables of what is the same, better or not there, for scripts of the old TFTrainer and of optimum-neuron."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from loopwright.errors import ArgumentsError
from loopwright.neuron.arguments import REFUSED, NeuronTrainingArguments
from tests.docs.blocks import ROOT

pytestmark = [
    pytest.mark.xdist_group("tensorflow"),
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow"),
]
TABLE = re.compile(r"^\| `(\w+)` \| (same|better|new|not there)", re.MULTILINE)
MADE_BY_THE_CONSTRUCTOR = {"train_loss", "eval_loss"}


def rows(page: str, heading: str) -> dict[str, str]:
    """Which names of a table are the same, better or not there."""
    text = (ROOT / "docs" / "move" / page).read_text(encoding="utf-8")
    found = dict(TABLE.findall(text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]))
    assert len(found) > 20
    return found


def test_methods_of_the_old_tf_trainer_are_where_the_page_says():
    from loopwright import TFTrainer

    for name, how in rows("tftrainer.md", "Methods and attributes").items():
        assert (hasattr(TFTrainer, name) or name in MADE_BY_THE_CONSTRUCTOR) == (how != "not there"), name


ODD = {"tpu_name": "x", "evaluation_strategy": "epoch", "lr_scheduler_type": "cosine", "report_to": "none",
       "save_strategy": "epoch", "debug": "underflow_overflow", "resume_from_checkpoint": "auto", "tpu_zone": "z",
       "gcp_project": "p", "label_smoothing_factor": 0.1}  # fmt: skip
"""Values of arguments that are not numbers or switches."""
TOGETHER = {"load_best_model_at_end": {"eval_strategy": "steps", "eval_steps": 500}}


@pytest.mark.parametrize("name", rows("tftrainer.md", "Arguments"))
def test_an_argument_of_the_old_tf_trainer_is_accepted_or_refused_as_the_page_says(name, tmp_path):
    from loopwright import TFTrainingArguments

    default = getattr(TFTrainingArguments(str(tmp_path)), name, None)
    value = ODD.get(name, 2 if isinstance(default, int | float) and not isinstance(default, bool) else True)
    value = 2 if name == "past_index" else value
    if rows("tftrainer.md", "Arguments")[name] == "not there":
        with pytest.raises(ArgumentsError, match=name):
            TFTrainingArguments(str(tmp_path), **{name: value})
    else:
        TFTrainingArguments(str(tmp_path), **{name: value}, **TOGETHER.get(name, {}))


def test_arguments_of_optimum_neuron_are_accepted_or_refused_as_the_page_says(tmp_path):
    listed = rows("optimum-neuron.md", "Arguments")
    always_on = {"recompute_causal_mask", "skip_cache_push"}
    assert {name for name, how in listed.items() if how == "not there"} == set(REFUSED) - always_on
    defaults = NeuronTrainingArguments(str(tmp_path))
    for name in listed:
        assert hasattr(defaults, name), name

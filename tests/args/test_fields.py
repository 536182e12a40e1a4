"""Every argument: its default, its help, what it accepts and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re

import pytest

from loopwright.args.base import BaseArguments
from loopwright.args.field import UNSET, Unset, arg, between, default_of, nearest, positive, specs, steps_or_share
from loopwright.args.groups.generation import GenerationArgs
from loopwright.args.reading import read
from loopwright.args.reference import markdown_reference
from loopwright.args.setters import Setters
from loopwright.errors import ArgumentsError
from loopwright.pt.arguments import Seq2SeqTrainingArguments

CHANGED_DEFAULTS = {"restore_callback_states_from_checkpoint": True, "enable_jit_checkpoint": True}
NEW = {
    "param_groups": None,
    "train_dataset_weights": None,
    "logging_source_losses": True,
    "strict": False,
    "speed": "auto",
    "per_device_train_batch_tokens": None,
    "batch_packing": None,
    "static_lengths": None,
    "on_nonfinite": "continue",
    "on_spike": None,
    "checkpoint_format": "auto",
    "async_save": True,
    "save_minutes": None,
    "save_samples": None,
    "save_trigger_file": None,
    "take_over": False,
    "save_on_interrupt": False,
    "max_runtime": None,
    "max_recompiles": None,
    "measure_matmul": False,
    "torch_compile_scope": "blocks",
    "fp8": False,
    "eval_loss_reduction": "item_mean",
    "half_precision_backend": "auto",
    "fp16_opt_level": "O1",
    "logging_dir": None,
    "chart": False,
    "html_report": True,
}
SPECS = {name: spec for name, spec in specs(Seq2SeqTrainingArguments).items() if spec.row is None}


def theirs() -> dict[str, object]:
    transformers = pytest.importorskip("transformers")
    return {field.name: default_of(field) for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}


def test_every_argument_of_transformers_is_here_with_its_default():
    expected = {**theirs(), **CHANGED_DEFAULTS}
    ours = {name: spec.default for name, spec in SPECS.items()}
    assert {name: ours.get(name, "missing") for name in expected} == expected


def test_nothing_else_is_here_but_the_new_arguments():
    assert {name: SPECS[name].default for name in SPECS if name not in theirs()} == NEW


def test_every_argument_has_one_sentence_of_help():
    assert [name for name, spec in SPECS.items() if not spec.help.endswith(".") or len(spec.help) >= 140] == []


def test_every_default_is_accepted_when_given():
    unlike = [
        name
        for name, spec in SPECS.items()
        if name != "output_dir"
        and Seq2SeqTrainingArguments("out", **{name: copy.copy(spec.default)}) != Seq2SeqTrainingArguments("out")
    ]
    assert unlike == []
    assert Seq2SeqTrainingArguments(SPECS["output_dir"].default) == Seq2SeqTrainingArguments(None)


def test_output_dir_is_the_first_positional_argument():
    assert next(iter(inspect.signature(BaseArguments).parameters)) == "output_dir"
    assert next(iter(inspect.signature(Seq2SeqTrainingArguments).parameters)) == "output_dir"
    assert Seq2SeqTrainingArguments("here").output_dir == "here"


WRONG = {bool: "perhaps", int: 1.5, float: "many", str: 3}
PLAIN = {name: kind for name, spec in SPECS.items() for kind in WRONG if spec.hint in (kind, kind | None)}


def refusal(**values: object) -> str:
    """What is said about arguments that are refused; nothing if they are accepted."""
    try:
        Seq2SeqTrainingArguments(**values)
    except ArgumentsError as error:
        return str(error)
    return ""


def test_a_value_of_another_type_is_refused_by_name():
    plain = {name: WRONG[kind] for name, kind in PLAIN.items() if not SPECS[name].as_given}
    assert [name for name, value in plain.items() if f"{name}: " not in refusal(**{name: value})] == []


def test_a_value_outside_the_choices_is_refused_with_the_nearest():
    accepted = []
    for name in (name for name, spec in SPECS.items() if spec.choices):
        valid = next(choice for choice in SPECS[name].choices if len(choice) > 1)
        said = refusal(**{name: f"{valid}x"})
        if not re.search(f"{name}='{valid}x': must be one of .*did you mean", said):
            accepted.append((name, said))
    assert accepted == []


@pytest.mark.parametrize("value", [-0.5, -3, float("nan"), float("inf")])
def test_numbers_out_of_range_are_refused_by_name(value):
    numbers = [name for name, spec in SPECS.items() if PLAIN.get(name) in (int, float) and spec.check]
    assert numbers and [name for name in numbers if name not in refusal(**{name: value})] == []


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("learning_rate", "5e-4", 5e-4),
        ("learning_rate", 1, 1),
        ("max_steps", "20", 20),
        ("max_steps", 1e3, 1000),
        ("logging_steps", 10.0, 10),
        ("logging_steps", 0.25, 0.25),
        ("bf16", "true", True),
        ("bf16", 0, False),
        ("tf32", None, None),
        ("lr_scheduler_kwargs", '{"num_cycles": "2", "deep": {"on": "true"}}', {"num_cycles": 2, "deep": {"on": True}}),
        ("include_num_input_tokens_seen", True, "all"),
        ("include_num_input_tokens_seen", False, "no"),
        ("eval_strategy", False, "no"),
        ("save_total_limit", 0, None),
        ("max_runtime", "1-02:03:04", "1-02:03:04"),
    ],
)
def test_values_are_read_as_their_type(name, given, value):
    read_back = getattr(BaseArguments("out", **{name: given}), name)
    assert read_back == value and isinstance(read_back, type(value))


def test_numpy_numbers_become_plain_ones():
    numpy = pytest.importorskip("numpy")
    args = BaseArguments("out", seed=numpy.int64(3), learning_rate=numpy.float32(0.5), bf16=numpy.bool_(True))
    assert (type(args.seed), type(args.learning_rate), type(args.bf16)) == (int, float, bool)


def test_dict_arguments_are_read_from_a_json_file(tmp_path):
    (tmp_path / "options.json").write_text('{"even_batches": false, "non_blocking": true}')
    args = BaseArguments("out", accelerator_config=str(tmp_path / "options.json"))
    assert args.accelerator_config.non_blocking and not args.accelerator_config.even_batches


@pytest.mark.parametrize("given", ["no_such_file.json", "{broken", '["a list"]', "{"])
def test_what_is_not_a_json_object_is_refused(given):
    with pytest.raises(ArgumentsError, match="lr_scheduler_kwargs"):
        BaseArguments("out", lr_scheduler_kwargs=given)


def test_accelerator_config_refuses_unknown_keys():
    with pytest.raises(ArgumentsError, match="did you mean 'even_batches'"):
        BaseArguments("out", accelerator_config={"even_batch": True})


def test_transformers_own_accelerator_config_is_read():
    module = pytest.importorskip("transformers.trainer_pt_utils")
    args = BaseArguments("out", accelerator_config=module.AcceleratorConfig(non_blocking=True))
    assert args.accelerator_config.non_blocking is True


@pytest.mark.parametrize("value", ["soon", "1:2", 0, -1, "0"])
def test_a_runtime_that_is_no_duration_is_refused(value):
    with pytest.raises(ArgumentsError, match="max_runtime"):
        BaseArguments("out", max_runtime=value)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_unset_stays_the_only_one(duplicate):
    assert duplicate(UNSET) is UNSET is Unset()
    assert repr(UNSET) == "UNSET" and not UNSET


def test_checks_return_the_end_of_a_sentence():
    assert positive(1) is None and positive(True) == "must be a number above 0"
    assert between(0, 1)(1) is None and between(0, 1, below=True)(1) == "must be a number from 0 to just below 1"
    assert steps_or_share(0.5) is None and steps_or_share(1.5).startswith("must be an integer")


def test_mutable_defaults_are_not_shared():
    field = arg([], "A list.")
    assert field.default_factory() is not field.default_factory()
    assert BaseArguments().include_for_metrics is not BaseArguments().include_for_metrics


def test_nearest_says_nothing_when_nothing_is_near():
    assert nearest("zzz", ["learning_rate"]) == ""


def test_setters_have_the_defaults_of_the_fields():
    names = {
        "batch_size": "per_device_train_batch_size",
        "num_epochs": "num_train_epochs",
        "nan_inf_filter": "logging_nan_inf_filter",
        "replica_level": "log_level_replica",
        "report_to": "report_to",
        "max_steps": "max_steps",
        "learning_rate": "learning_rate",
        "weight_decay": "weight_decay",
        "pin_memory": "dataloader_pin_memory",
        "in_order": "dataloader_in_order",
        "beta1": "adam_beta1",
        "beta2": "adam_beta2",
        "epsilon": "adam_epsilon",
        "total_limit": "save_total_limit",
    }
    for name, setter in inspect.getmembers(Setters, inspect.isfunction):
        for parameter in inspect.signature(setter).parameters.values():
            if name.startswith("set_") and parameter.name in names:
                assert parameter.default == SPECS[names[parameter.name]].default, (name, parameter.name)
    logging = inspect.signature(Setters.set_logging).parameters
    assert logging["on_each_node"].default is SPECS["log_on_each_node"].default
    assert inspect.signature(Setters.set_optimizer).parameters["name"].default == SPECS["optim"].default


def test_the_reference_lists_every_argument_once():
    text = markdown_reference(Seq2SeqTrainingArguments)
    assert [name for name in SPECS if text.count(f"| `{name}` |") != 1] == []
    assert [word for word in ("typing.", "loopwright.", "NoneType", "<class") if word in text] == []


def test_generation_arguments_are_their_own_group():
    assert list(specs(GenerationArgs)) == [name for name, spec in SPECS.items() if spec.title == "Generation"]


def test_a_default_of_none_may_be_given():
    assert read(SPECS["data_seed"], None) is None

"""transformers' HfArgumentParser reads our classes, old names included."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from loopwright.args.base import BaseArguments
from loopwright.args.legacy import LegacyArgs
from loopwright.pt.arguments import Seq2SeqTrainingArguments, TrainingArguments

transformers = pytest.importorskip("transformers")


@dataclass
class ModelArguments:
    """Beside ours, as in every example script."""

    model_name_or_path: str = "none"


@dataclass
class OwnArguments(TrainingArguments):
    """A user's dataclass."""

    cache_dir: str | None = field(default=None, metadata={"help": "A folder."})


def parse(*words: str, cls: type = TrainingArguments) -> BaseArguments:
    parser = transformers.HfArgumentParser((ModelArguments, cls))
    _, args = parser.parse_args_into_dataclasses(list(words), look_for_args_file=False)
    return args


@pytest.mark.parametrize("cls", [BaseArguments, TrainingArguments, OwnArguments, Seq2SeqTrainingArguments])
def test_no_words_give_the_defaults(cls):
    assert parse(cls=cls) == cls()


CASES = [
    ("--output_dir out --learning_rate 1e-3", {"output_dir": "out", "learning_rate": 1e-3}),
    ("--bf16 --no_async_save", {"bf16": True, "async_save": False}),
    ("--tf32 True --disable_tqdm False", {"tf32": True, "disable_tqdm": False}),
    ("--optim muon --lr_scheduler_type cosine", {"optim": "muon", "lr_scheduler_type": "cosine"}),
    ("--eval_strategy steps --eval_steps 0.1", {"eval_strategy": "steps", "eval_steps": 0.1}),
    ("--warmup_steps 20", {"warmup_steps": 20}),
    ("--include_for_metrics inputs loss", {"include_for_metrics": ["inputs", "loss"]}),
    ("--label_names a b", {"label_names": ["a", "b"]}),
    ("--include_num_input_tokens_seen", {"include_num_input_tokens_seen": "all"}),
    ("--include_num_input_tokens_seen non_padding", {"include_num_input_tokens_seen": "non_padding"}),
    ("--include_num_input_tokens_seen False", {"include_num_input_tokens_seen": "no"}),
    ('--lr_scheduler_kwargs {"num_cycles":2}', {"lr_scheduler_kwargs": {"num_cycles": 2}}),
    ("--report_to tensorboard", {"report_to": ["tensorboard"]}),
    ("--max_runtime 01:00:00", {"max_runtime": "01:00:00"}),
    ("--max_runtime 3600", {"max_runtime": "3600"}),
    ("--save_trigger_file x --save_minutes 5", {"save_trigger_file": "x", "save_minutes": 5}),
    ("--evaluation_strategy epoch", {"eval_strategy": "epoch"}),
    ("--evaluate_during_training", {"eval_strategy": "steps"}),
    ("--no_cuda --group_by_length True", {"use_cpu": True, "train_sampling_strategy": "group_by_length"}),
    ("--overwrite_output_dir --warmup_ratio 0.1", {"warmup_steps": 0.1}),
    ("--per_gpu_train_batch_size 3 --adafactor", {"per_device_train_batch_size": 3, "optim": "adafactor"}),
    ("--save_safetensors True --no_cuda False", {"use_cpu": False}),
]


@pytest.mark.parametrize(("words", "expected"), CASES, ids=[words for words, _ in CASES])
def test_words_become_arguments(words, expected):
    args = parse(*words.split())
    assert {name: getattr(args, name) for name in expected} == expected


def test_words_become_arguments_of_a_users_dataclass():
    args = parse("--cache_dir", "x", "--evaluation_strategy", "epoch", cls=OwnArguments)
    assert (args.cache_dir, args.eval_strategy) == ("x", "epoch")


def test_generation_words():
    args = parse("--predict_with_generate", "--generation_config", "some/name", cls=Seq2SeqTrainingArguments)
    assert (args.predict_with_generate, args.generation_config) == (True, "some/name")


def test_the_help_page_can_be_written():
    text = transformers.HfArgumentParser(Seq2SeqTrainingArguments).format_help()
    assert all(f"--{name}" in text for name in LegacyArgs.__dataclass_fields__)


def test_a_json_file_is_read(tmp_path):
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"output_dir": "out", "evaluation_strategy": "epoch", "learning_rate": "5e-5"}))
    (args,) = transformers.HfArgumentParser(TrainingArguments).parse_json_file(str(path))
    assert (args.eval_strategy, args.learning_rate) == ("epoch", 5e-5)


def test_a_yaml_file_is_read(tmp_path):
    path = tmp_path / "args.yaml"
    path.write_text("output_dir: out\nlearning_rate: 5e-5\nsave_strategy: no\nmax_steps: 1e3\n")
    (args,) = transformers.HfArgumentParser(TrainingArguments).parse_yaml_file(str(path))
    assert (args.learning_rate, args.save_strategy, args.max_steps) == (5e-5, "no", 1000)

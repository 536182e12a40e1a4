"""`loopwright dryrun` compiles a trainer's step for TPUs, says what it takes, and says what it cannot do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from loopwright import NeuronTrainingArguments, Trainer, TrainingArguments
from loopwright.cli import main as cli
from loopwright.cli.commands import dryrun as command
from loopwright.errors import ArgumentsError, ModelError
from loopwright.xla import dryrun, topologies

ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in topologies.PACKAGES if find_spec(name) is None]
for_real = pytest.mark.skipif(
    bool(MISSING),
    reason=f"{', '.join(MISSING)} not installed: pip install {topologies.INSTALL}, in an environment of their own",
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))

    def forward(self, x, labels=None):
        logits = self.body(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_trainer(folder, **options):
    rows = [{"x": torch.randn(6), "labels": torch.tensor(i % 3)} for i in range(8)]
    args = TrainingArguments(str(folder), use_cpu=True, report_to=[], **options)
    return Trainer(Net(), args, train_dataset=rows)


# ---- what is asked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "chips"), [("v5e:2x2", 4), ("v5e:1x1", 1), ("v6e:4x4", 16), ("v5p:2x2x1", 4), ("v5p:2x2x2", 8)]
)
def test_topology_has_as_many_chips_as_its_numbers_say(name, chips):
    assert topologies.read_topology(name).chips == chips


@pytest.mark.parametrize("name", ["v4:2x2", "v5e", "v5e:", "v5e:2", "v5e:2x2x1", "v5p:2x2", "v5e:0x2", "v6e:4xa", ""])
def test_wrong_topology_is_bad_input_with_an_example(name, capsys):
    assert cli.main(["dryrun", "train.py", "--topology", name]) == 2
    said = capsys.readouterr().err
    assert f"--topology {name}:" in said and any(example in said for example in topologies.EXAMPLES.values())


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("absent.py", "no file 'absent.py'"),
        ("empty.py", "no function make_trainer()"),
        ("empty.py:other", "no function other()"),
        ("no_such_package_of_mine.train:make", "no module 'no_such_package_of_mine.train'"),
    ],
)
def test_target_that_is_not_there_is_bad_input(target, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty.py").write_text("value = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert cli.main(["dryrun", target]) == 2
    assert said in capsys.readouterr().err


def test_error_inside_the_users_module_is_not_taken_for_a_missing_module(tmp_path, monkeypatch):
    (tmp_path / "broken_script_of_mine.py").write_text("import no_such_package_of_mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ModuleNotFoundError, match="no_such_package_of_mine"):
        command.find_maker("broken_script_of_mine:make_trainer")


def test_function_must_return_a_trainer(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("def make_trainer():\n    return 3\n")
    monkeypatch.setattr(command, "check_packages", lambda: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert cli.main(["dryrun", str(tmp_path / "train.py")]) == 2
    assert "returned int; it must return a loopwright.Trainer" in capsys.readouterr().err


def test_missing_packages_are_named_with_the_command_before_the_trainer_is_made(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("def make_trainer():\n    raise AssertionError('made')\n")
    monkeypatch.setattr(topologies, "PACKAGES", ("torch", "no_such_package_of_mine"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert cli.main(["dryrun", str(tmp_path / "train.py")]) == 1
    said = capsys.readouterr().err
    assert "'no_such_package_of_mine'" in said and 'pip install torchax==0.0.13 "jax[tpu]==0.10.2"' in said


def test_jax_is_not_imported_before_something_is_compiled():
    code = (
        "import sys, loopwright.cli.commands.dryrun, loopwright.xla.dryrun; print({'jax', 'torchax'} & {*sys.modules})"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert found.stdout == "set()\n", found.stderr


# ---- what is compiled -----------------------------------------------------------------------------------------------


def test_options_of_adamw_come_from_the_trainers_own_optimizer(tmp_path):
    trainer = make_trainer(tmp_path, weight_decay=0.1, adam_beta1=0.8)
    trainer.model.body[0].requires_grad_(False)
    options = dryrun.adamw_options(trainer)
    decays = {name: group["weight_decay"] for name, group in options.items()}
    assert decays == {"body.1.bias": 0.0, "body.1.weight": 0.0, "body.2.bias": 0.0, "body.2.weight": 0.1}
    assert all(group["betas"] == (0.8, 0.999) for group in options.values())


@pytest.mark.parametrize("options", [{"optim": "adafactor"}, {"optim": "sgd"}, {"optim_args": "amsgrad=True"}])
def test_other_optimizers_are_refused(options, tmp_path):
    with pytest.raises(ArgumentsError, match="compiles AdamW only"):
        dryrun.adamw_options(make_trainer(tmp_path, **options))


def test_fp16_is_refused():
    with pytest.raises(ArgumentsError, match="use bf16=True"):
        dryrun.left_out(SimpleNamespace(fp16=True))


def test_nothing_to_train_is_said(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.model.requires_grad_(False)
    with pytest.raises(ModelError, match="none of them requires a gradient"):
        dryrun.adamw_options(trainer)


def test_what_is_left_out_is_noted():
    plain = TrainingArguments("unused", use_cpu=True)
    assert dryrun.left_out(plain) == []
    more = TrainingArguments("unused", use_cpu=True, gradient_checkpointing=True, gradient_accumulation_steps=4)
    notes = " ".join(dryrun.left_out(more))
    assert "gradient_checkpointing" in notes and "one of 4 micro-batches" in notes and "weights" in notes


@pytest.mark.parametrize(("options", "named"), [({"xla_spmd": "data"}, None), ({"xla_spmd": "fsdp"}, "xla_spmd"),
                                                ({"tensor_parallel_size": 2}, "tensor_parallel_size")])  # fmt: skip
def test_split_weights_are_noted_as_left_out(options, named):
    notes = dryrun.left_out(NeuronTrainingArguments("unused", use_cpu=True, bf16=False, **options))
    assert [f"({named})" in note for note in notes] == ([True] if named else [])


def test_batches_without_names_are_refused(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(trainer, "get_train_dataloader", lambda: [(torch.zeros(2), torch.zeros(2))])
    with pytest.raises(ArgumentsError, match="batches that are dicts"):
        dryrun.first_batch(trainer)


def result(**values):
    known = {
        "topology": "v5e:2x2", "chips": 4, "hbm_bytes": 2**34, "seconds": 1.0, "fits": True, "operations": 2.5e9,
        "argument_bytes": 2**30, "temporary_bytes": 2**29, "program_bytes": 0, "result_bytes": 0,
        "total_bytes": 3 * 2**30, "collectives": {"all-reduce": 2},
    }  # fmt: skip
    return {**known, **values}


def text(**values):
    head = {"model": "Net", "parameters": 1000, "trained": 900, "precision": "float32", "batch": {"x": [8, 6]}}
    return command.text_of({**head, "notes": ["a note"], "topologies": [result(**values)]})


def test_report_says_what_is_on_a_chip():
    said = text()
    for part in ("4 chips", "1.00 GiB", "512.00 MiB", "3.00 GiB  of 16 GiB: fits (19%)", "2.5 billion", "2 all-reduce",
                 "x 8x6", "note: a note", "nothing ran on a TPU"):  # fmt: skip
        assert part in said


def test_report_says_when_it_does_not_fit():
    assert "of 16 GiB: DOES NOT FIT" in text(fits=False)
    said = text(fits=False, too_large=True, error="Used 20G\nand so on")
    assert "DOES NOT FIT in 16 GiB of chip memory: Used 20G" in said and "and so on" not in said
    assert "the compiler failed: no rule" in text(fits=False, too_large=False, error="no rule")


# ---- for real -------------------------------------------------------------------------------------------------------

SCRIPT = '''
import sys
import torch
from torch import nn
from loopwright import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
        self.fixed = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return {"logits": self.fixed(self.body(x)) * self.scale}

class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs["logits"], labels, weight=torch.tensor([1.0, 2.0, 3.0]))
        return (loss, outputs) if return_outputs else loss

class Peeking(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        logits = model(inputs["x"])["logits"]
        return logits.sum() if logits.sum().item() > 0 else -logits.sum()

def trainer_of(kind, model, rows, **options):
    args = TrainingArguments(
        "out", per_device_train_batch_size=8, max_steps=1, learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.1,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, speed="off",
        **options,
    )
    return kind(model, args, train_dataset=rows)

def plain(kind=Weighted, width=6):
    torch.manual_seed(0)
    rows = [{"x": torch.randn(width), "labels": torch.tensor(i % 3)} for i in range(8)]
    return trainer_of(kind, Net(), rows)

def peeking():
    return plain(Peeking)

def llama(length=32, **options):
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=length, tie_word_embeddings=True, attention_dropout=0.1,
    )
    ids = torch.randint(0, 128, (8, length))
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]
    return trainer_of(Trainer, LlamaForCausalLM(config), rows, bf16=True, **options)

def long_llama():
    return llama(16384)

def everything(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}

if __name__ == "__main__":
    trained = plain()
    trained.train()
    expected = everything(trained.model)
    trainer = plain()
    from loopwright.xla import dryrun
    dryrun.import_torchax()
    import jax
    import numpy as np
    batch = dryrun.first_batch(trainer)
    step = dryrun.build_step(trainer, batch, 1)
    before = {name: tensor.detach().numpy() for name, tensor in everything(trainer.model).items()}
    weights, frozen, _, count, loss = jax.jit(step.function)(
        {name: before[name] for name in step.weights}, {name: before[name] for name in step.frozen},
        jax.tree.map(lambda each: np.zeros(each.shape, each.dtype), step.moments),
        {name: value.numpy() for name, value in batch.items()}, np.int32(0), np.float32(1e-2), jax.random.PRNGKey(0),
    )
    after = {**weights, **frozen}
    assert after.keys() == expected.keys() and int(count) == 1
    moved = [name for name in before if abs(before[name] - np.asarray(after[name])).max() > 1e-3]
    assert sorted(moved) == sorted(step.weights), moved
    apart = max(abs(np.asarray(after[name]) - expected[name].detach().numpy()).max() for name in after)
    assert apart < 1e-6, apart
    assert abs(float(loss) - trained.state.log_history[-1]["train_loss"]) < 1e-6
    print("equal")
'''


@pytest.fixture
def script(tmp_path):
    """Runs a command beside the script; torchax adds a device to torch, which other tests must not see."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*words):
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )

    return run


@for_real
def test_the_step_is_the_one_that_training_takes(script):
    done = script("train.py")
    assert done.returncode == 0 and done.stdout.endswith("equal\n"), done.stderr


@for_real
def test_plain_module_with_a_loss_of_its_own_is_compiled(script, tmp_path):
    words = ["--topology", "v5e:1x1", "v5p:2x2x1", "--json", "report.json"]
    done = script("-m", "loopwright", "dryrun", "train.py:plain", *words)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [each["chips"] for each in report["topologies"]] == [1, 4]
    assert [each["hbm_bytes"] / 2**30 for each in report["topologies"]] == [16, 95]
    assert all(each["fits"] for each in report["topologies"])
    assert [bool(each["collectives"]) for each in report["topologies"]] == [False, True]
    assert report["parameters"] - report["trained"] == 12
    assert "v5p:2x2x1: 4 chips" in done.stdout and "all-reduce" in done.stdout


@for_real
def test_llama_in_bf16_holds_three_numbers_for_each_weight_on_every_chip(script, tmp_path):
    pytest.importorskip("transformers")
    done = script("-m", "loopwright", "dryrun", "train:llama", "--json", "report.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    (found,) = report["topologies"]
    assert found["topology"] == "v5e:2x2" and found["collectives"]["all-reduce"] >= 1
    assert 1 <= found["argument_bytes"] / (12 * report["parameters"]) < 1.2  # weight and two moments of 4 bytes
    assert found["total_bytes"] > found["argument_bytes"] + found["temporary_bytes"]
    assert report["precision"] == "float32 and bf16" and report["batch"]["input_ids"] == [8, 32]


@for_real
def test_step_that_is_too_large_is_said_not_to_fit(script):
    pytest.importorskip("transformers")
    done = script("-m", "loopwright", "dryrun", "train.py:long_llama")
    assert done.returncode == 1 and "DOES NOT FIT" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr


@for_real
def test_grid_that_cannot_be_built_is_bad_input(script):
    done = script("-m", "loopwright", "dryrun", "train.py:plain", "--topology", "v5e:3x3")
    assert done.returncode == 2 and "--topology v5e:3x3: libtpu cannot describe it" in done.stderr, done.stderr


@for_real
def test_loss_that_looks_at_a_value_is_a_limit_of_the_dry_run(script):
    done = script("-m", "loopwright", "dryrun", "train.py:peeking")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "this does not affect training" in done.stderr and "logits.sum().item()" in done.stderr, done.stderr

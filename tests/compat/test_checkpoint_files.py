"""After install(): the files of checkpoints, and what is logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_installation import run

pytest.importorskip("transformers")

SETTING = """
import loopwright.compat
loopwright.compat.install()
import dataclasses, logging, os, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                        intermediate_size=16, attention_dropout=0.1))

data = [{"input_ids": [i % 16] * 6, "labels": [i % 16] * 6} for i in range(24)]

def trained(folder, resume=None, changed=None, arguments=TrainingArguments, make=model, **options):
    args = arguments(folder, per_device_train_batch_size=4, num_train_epochs=2, save_steps=4, logging_steps=1,
                     use_cpu=True, **{"disable_tqdm": True, **options})
    trainer = Trainer(make(), args, train_dataset=data, **(changed or {}))
    trainer.train(resume_from_checkpoint=resume)
    return trainer

def files(folder):
    return set(os.listdir(os.path.join(folder, "checkpoint-4")))

THEIRS = {"model.safetensors", "config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json",
          "training_args.bin"}
"""


def test_checkpoints_have_the_files_of_transformers_and_resume_exactly(tmp_path: Path) -> None:
    done = run(
        SETTING
        + """
whole = trained("whole")
assert THEIRS <= files("whole"), files("whole")
assert not {"optimizer.json", "optimizer.safetensors", "weights.json"} & files("whole")
part = trained("part", resume="whole/checkpoint-4")
for name, value in whole.model.state_dict().items():
    assert torch.equal(value, part.model.state_dict()[name]), name
assert "optimizer.pt" not in files(trained("native", checkpoint_format="native").args.output_dir)

loopwright.compat.uninstall()
trained("own")
assert "optimizer.pt" not in files("own")
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_what_their_files_cannot_restore_is_saved_natively_and_reported(tmp_path: Path) -> None:
    done = run(
        SETTING
        + """
class Odd(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("of", {parameter: 1.0})
        return super().step(closure)

@dataclasses.dataclass
class Unusual(TrainingArguments):
    choose: object = None

trained("arguments", arguments=Unusual, choose=lambda: 1, log_level="info")
assert "optimizer.json" in files("arguments")
network = model()
optimizer = Odd(network.parameters(), lr=0.01)
changed = {"optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))}
trained("optimizer", make=lambda: network, changed=changed, log_level="info")
assert "optimizer.json" in files("optimizer")
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    told = "checkpoints have loopwright's own files, not those of transformers: "
    assert f"{told}the arguments cannot be saved" in done.stderr
    assert f"{told}the optimizer's state holds a mapping by parameter" in done.stderr


def test_a_log_level_is_that_of_transformers_too(tmp_path: Path) -> None:
    done = run(
        SETTING
        + """
import transformers
trained("run", log_level="info", save_strategy="no", disable_tqdm=False)
assert transformers.logging.get_verbosity() == transformers.logging.INFO
trained("quiet", log_level="error", save_strategy="no")
transformers.logging.set_verbosity_info()
logging.getLogger("loopwright").info("still heard")
loopwright.compat.uninstall()
assert logging.getLogger("loopwright").level == logging.NOTSET
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Running training on 24 samples") == 1 and "still heard" in done.stderr


def test_weights_beside_an_adapter_are_restored(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    done = run(
        SETTING
        + """
from peft import LoraConfig, get_peft_model

def adapted():
    network = get_peft_model(model(), LoraConfig(target_modules=["q_proj"], r=2))
    network.base_model.model.lm_head.weight.requires_grad_(True)
    return network

whole = trained("whole", make=adapted)
assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.pt"} <= files("whole"), files("whole")
part = trained("part", make=adapted, resume="whole/checkpoint-4")
for name, value in whole.model.state_dict().items():
    assert torch.equal(value, part.model.state_dict()[name]), name
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr

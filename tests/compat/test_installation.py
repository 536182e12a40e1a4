"""install() and uninstall(): which names are replaced, when it is refused, and what is put back."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import loopwright

transformers = pytest.importorskip("transformers")

SOURCE = str(Path(loopwright.__file__).parents[1])


def run(text: str, tmp_path: Path, *arguments: str, command: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own: an installation changes modules of the whole process."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    environment = {"PYTHONPATH": SOURCE, "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    return subprocess.run(
        [sys.executable, *command, str(script), *arguments],
        capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environment,
    )  # fmt: skip


def test_classes_are_replaced_and_put_back(tmp_path: Path) -> None:
    done = run(
        """
        import gc
        import sys
        from types import ModuleType

        import transformers
        from transformers import Trainer, TrainerCallback, TrainingArguments
        from transformers.integrations import WandbCallback
        import torch
        from torch.optim import SGD

        other = ModuleType("other")
        other.Base, sys.modules["other"] = Trainer, other
        before, old_arguments = (Trainer, TrainingArguments, TrainerCallback), TrainingArguments("out", use_cpu=True)

        import loopwright
        from loopwright.compat import install, installed, is_installed, uninstall

        class Mine(TrainerCallback):
            def on_train_begin(self, args, state, control, **kwargs): ...

        install()
        install()
        assert is_installed()
        for module in (transformers, transformers.trainer, transformers.training_args, sys.modules[__name__]):
            for name in ("Trainer", "TrainingArguments", "TrainerCallback"):
                if hasattr(module, name):
                    assert getattr(module, name) is getattr(loopwright, name), (module, name)
        from transformers import IntervalStrategy, SchedulerType
        args = TrainingArguments("out", eval_strategy="steps", use_cpu=True)
        assert args.eval_strategy is IntervalStrategy.STEPS and isinstance(args.lr_scheduler_type, SchedulerType)
        schedule = transformers.get_scheduler(SchedulerType.CONSTANT, SGD([torch.ones(1)], lr=1.0))
        assert schedule.get_last_lr() == [1.0]
        assert other.Base is loopwright.Trainer
        assert WandbCallback is loopwright.WandbCallback
        from transformers.integrations import get_reporting_integration_callbacks
        assert get_reporting_integration_callbacks("mlflow") == [loopwright.MLflowCallback]
        from transformers import EarlyStoppingCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments
        assert Seq2SeqTrainer is loopwright.Seq2SeqTrainer
        assert Seq2SeqTrainingArguments is loopwright.Seq2SeqTrainingArguments
        assert EarlyStoppingCallback is loopwright.EarlyStoppingCallback
        assert issubclass(WandbCallback, loopwright.TrainerCallback) and issubclass(Mine, loopwright.TrainerCallback)
        assert isinstance(loopwright.TrainingArguments("out"), TrainingArguments)
        assert isinstance(old_arguments, loopwright.TrainingArguments)
        from loopwright.core.events import EVENTS
        heard = [name for name in EVENTS if getattr(Mine, name) is not getattr(TrainerCallback, name)]
        assert heard == ["on_train_begin"]

        uninstall()
        gc.freeze()
        assert not is_installed()
        assert (transformers.Trainer, TrainingArguments, transformers.trainer_callback.TrainerCallback) == before
        assert other.Base is before[0] and WandbCallback.__mro__[1] is before[2]
        with installed():
            assert transformers.Trainer is loopwright.Trainer
            with installed():
                pass
            assert transformers.Trainer is loopwright.Trainer
        assert transformers.Trainer is before[0]
        print("all of it")
        """,
        tmp_path,
    )
    assert done.stdout == "all of it\n", done.stderr


def test_an_installation_that_comes_too_late_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    done = run(
        """
        import transformers
        from transformers import Trainer, TrainingArguments

        class Earlier(Trainer): ...
        class EarlierArguments(TrainingArguments): ...

        import loopwright.compat
        try:
            loopwright.compat.install()
        except loopwright.LoopwrightError as error:
            print(error)
        print(transformers.Trainer.__module__, loopwright.compat.is_installed())
        """,
        tmp_path,
    )
    text, after = done.stdout.strip().splitlines()
    assert "__main__.Earlier(Trainer)" in text and "__main__.EarlierArguments(TrainingArguments)" in text, done.stderr
    assert "loopwright run" in text and after == "transformers.trainer False"


@pytest.mark.parametrize("name", ["axolotl", "unsloth"])
def test_libraries_that_rewrite_the_trainer_are_refused_by_name(name: str, tmp_path: Path) -> None:
    done = run(
        f"""
        import sys, types
        sys.modules[{name!r}] = types.ModuleType({name!r})
        import loopwright.compat
        try:
            loopwright.compat.install()
        except loopwright.NotAvailable as error:
            print(error)
        """,
        tmp_path,
    )
    assert name in done.stdout and "source text" in done.stdout, done.stderr


SCRIPT = """
import sys
import torch
from transformers import Trainer, TrainingArguments

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x, labels=None):
        out = self.linear(x)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}

rows = [{"x": torch.ones(2), "labels": torch.zeros(1)} for _ in range(4)]
args = TrainingArguments("out", max_steps=2, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True)
trainer = Trainer(Net(), args, train_dataset=rows)
trainer.train()
print("trained by", Trainer.__module__, sys.argv[1:], __name__)
"""


@pytest.mark.parametrize("command", [("-m", "loopwright.compat"), ("-m", "loopwright", "run")])
def test_a_script_runs_without_a_change(command: tuple[str, ...], tmp_path: Path) -> None:
    done = run(SCRIPT, tmp_path, "--word", "2", command=command)
    assert "trained by loopwright.pt.trainer ['--word', '2'] __main__" in done.stdout, done.stderr

"""What must be the same on the test device as on the CPU, to the last bit. Run in a process of its own:

    python contract.py LIBRARY FOLDER        prints one JSON line per case: its name, and what went wrong or null
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import loopwright
from loopwright.pt import device_traits
from loopwright.pt.restoring.kept_weights import KeptWeights
from tests.models import CPU, Tokens, bert_classes, bert_tokens, gpt2, llama, made, pad, samples, t5
from tests.native_device import device
from tests.neuron.weighted import WeightedLossTrainer

RAGGED = (11, 3, 29, 8, 17, 5, 20)
CASES: dict[str, Callable[[Path], None]] = {}
MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "llama": (llama, False), "gpt2": (gpt2, False), "bert tokens": (bert_tokens, False),
    "bert classes": (bert_classes, True), "t5": (t5, False), "own": (lambda: made(Tokens), False),
}  # fmt: skip
SPREAD: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"optim": "adamw_torch", "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}),
    ("llama", {"optim": "adamw_torch_fused", "lr_scheduler_type": "cosine"}),
    ("gpt2", {"optim": "adamw_torch", "max_grad_norm": 0.1}),
    ("bert tokens", {"optim": "sgd", "gradient_accumulation_steps": 3}),
    ("bert classes", {"optim": "adafactor"}),
    ("bert classes", {"optim": "adamw_torch", "label_smoothing_factor": 0.1}),
    ("t5", {"optim": "adamw_torch", "train_sampling_strategy": "random"}),
    ("own", {"optim": "adamw_torch", "on_nonfinite": "skip", "max_grad_norm": 1.0}),
    ("own", {"optim": "rmsprop", "torch_empty_cache_steps": 1, "skip_memory_metrics": False}),
    ("gpt2", {"gradient_checkpointing": True, "optim": "adamw_torch"}),
]
"""One combination of model and arguments for each thing that touches a device in its own way."""


def case(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CASES[function.__name__] = function
    return function


def trainer_on(kind: str, name: str, folder: Path, *, cls: Any = loopwright.Trainer, **options: Any) -> Any:
    build, classes = MODELS[name]
    own = ("compute_metrics", "callbacks", "model")
    given = {key: options.pop(key) for key in own if key in options}
    data = samples(RAGGED, classes=classes)
    base = {**CPU, "use_cpu": kind == "cpu", "static_lengths": [32], "num_train_epochs": 2,
            "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}  # fmt: skip
    seq2seq = issubclass(cls, loopwright.Seq2SeqTrainer)
    made_of = loopwright.Seq2SeqTrainingArguments if seq2seq else loopwright.TrainingArguments
    args = made_of(output_dir=str(folder / kind), **{**base, **options})
    trainer = cls(model=given.pop("model", None) or build(), args=args, data_collator=pad, train_dataset=data,
                  eval_dataset=data, **given)  # fmt: skip
    assert trainer._loopwright.device.type == kind
    return trainer


def same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(mine.cpu(), other.cpu()), f"{name} differs by {(mine.cpu() - other.cpu()).abs().max()}"


def losses(trainer: Any) -> list[float]:
    return [log[key] for log in trainer.state.log_history for key in ("loss", "grad_norm", "eval_loss") if key in log]


def train_on_both(name: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    trainers = [trainer_on(kind, name, folder, **options) for kind in ("cpu", device.NAME)]
    for trainer in trainers:
        trainer.train()
    same(*(each.model for each in trainers))
    assert losses(trainers[0]) == losses(trainers[1]) and losses(trainers[0])
    return trainers[0], trainers[1]


def _spread(name: str, options: dict[str, Any]) -> Callable[[Path], None]:
    return lambda folder: train_on_both(name, folder, **options) and None


for _number, (_name, _options) in enumerate(SPREAD):
    CASES[f"loss grid {_number}: {_name} {' '.join(map(str, _options.values()))}"] = _spread(_name, _options)


@case
def evaluation(folder: Path) -> None:
    """Metrics, predictions and labels, with a metric function, during and after training."""

    def exact(prediction: Any) -> dict[str, float]:
        return {"match": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    pair = train_on_both("bert tokens", folder, eval_strategy="epoch", compute_metrics=exact)
    outputs = [each.predict(each.eval_dataset) for each in pair]
    assert (outputs[0].predictions == outputs[1].predictions).all() and outputs[0].predictions.shape[:2] == (7, 29)
    assert (outputs[0].label_ids == outputs[1].label_ids).all()
    for name in ("test_loss", "test_match"):
        assert outputs[0].metrics[name] == outputs[1].metrics[name]


@case
def metrics_by_batch(folder: Path) -> None:
    """A metric function that is called for each batch gets its inputs where predictions and labels are."""

    def alike(prediction: Any, compute_result: bool) -> dict[str, float]:
        return {"alike": float((prediction.inputs["labels"] == prediction.label_ids).all())}

    options = {"batch_eval_metrics": True, "include_for_metrics": ["inputs"], "compute_metrics": alike}
    kind = device_traits.kind_of(torch.device(device.NAME))
    try:
        for is_static in (True, False):  # outputs of padded batches are in host memory
            device_traits.register(device.NAME, replace(kind, static_shapes=is_static))
            trainer = trainer_on(device.NAME, "bert tokens", folder, static_lengths=None, **options)
            assert trainer.evaluate()["eval_alike"] == 1.0
    finally:
        device_traits.register(device.NAME, kind)


class Dropped(Tokens):
    """With dropout, so that random streams matter."""

    def logits(self, input_ids: Any) -> Any:
        return self.head(nn.functional.dropout(torch.tanh(self.mix(self.embed(input_ids))), 0.3, self.training))


MODELS["bert in single precision"] = (lambda: bert_classes().float(), True)
MODELS["dropped"] = (lambda: made(Dropped), False)


@case
def resuming(folder: Path) -> None:
    """Going on after step 2, on the same and on the other device, ends where the uninterrupted run ends."""
    options: dict[str, Any] = {
        "optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random",
    }  # fmt: skip
    whole = trainer_on(device.NAME, "dropped", folder / "whole", **options)
    whole.train()
    for start in ("cpu", device.NAME):
        first = trainer_on(start, "dropped", folder / f"from-{start}", max_steps=2, **options)
        first.train()
        saved = Path(first.args.output_dir) / "checkpoint-2"
        for end in ("cpu", device.NAME):
            second = trainer_on(end, "dropped", folder / f"{start}-{end}", **options)
            second.train(resume_from_checkpoint=str(saved))
            assert second.state.global_step == 4
            same(second.model, whole.model)


@case
def weighted_loss(folder: Path) -> None:
    pair = train_on_both("bert in single precision", folder, cls=WeightedLossTrainer, eval_strategy="epoch")
    assert not any("not padded with rows" in text for text in pair[1]._loopwright.notices.told)


@case
def generation(folder: Path) -> None:
    options = {"cls": loopwright.Seq2SeqNeuronTrainer, "predict_with_generate": True, "generation_max_length": 9}
    for name in ("t5", "llama"):
        extra = {} if name == "t5" else {"model": None}
        pair = [trainer_on(kind, name, folder / name, **options, **extra) for kind in ("cpu", device.NAME)]
        for trainer in pair:
            trainer.model.generation_config.pad_token_id = 0
            for row in trainer.eval_dataset:
                row["labels"][:2] = -100
            trainer.train()
        outputs = [trainer.predict(trainer.eval_dataset) for trainer in pair]
        assert (outputs[0].predictions == outputs[1].predictions).all() and len(outputs[0].predictions) == 7
        assert outputs[0].metrics["test_loss"] == outputs[1].metrics["test_loss"]


@case
def autocast(folder: Path) -> None:
    """bf16 computes in half precision on both; which operations are cast is each device's own list."""
    pair = [trainer_on(kind, "own", folder, bf16=True, optim="adamw_torch") for kind in ("cpu", device.NAME)]
    for trainer in pair:
        trainer.train()
    assert all(abs(a - b) < 2e-2 for a, b in zip(losses(pair[0]), losses(pair[1]), strict=True))
    assert next(pair[1].model.parameters()).dtype is torch.float64


@case
def saved_models(folder: Path) -> None:
    """What was trained on the device is loaded without it, tied weights included."""
    trainer = trainer_on(device.NAME, "gpt2", folder, max_steps=1)
    assert trainer.model.lm_head.weight is trainer.model.transformer.wte.weight
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    assert (folder / "saved" / "model.safetensors").is_file()
    fresh = loopwright.load_model(gpt2(), folder / "saved")
    same(fresh, trainer.model)


@case
def transformers_checkpoints(folder: Path) -> None:
    """checkpoint_format="transformers" is written from host memory, with and without a background copy."""
    for background in (True, False):
        options: dict[str, Any] = {"checkpoint_format": "transformers", "async_save": background}
        trainer = trainer_on(device.NAME, "own", folder / str(background), max_steps=1, save_strategy="steps",
                             save_steps=1, optim="adamw_torch", **options)  # fmt: skip
        trainer.train()
        state = torch.load(Path(trainer.args.output_dir) / "checkpoint-1" / "optimizer.pt", weights_only=True)
        assert {value.device.type for slots in state["state"].values() for value in slots.values()} == {"cpu"}


@case
def compiling(folder: Path) -> None:
    """torch.compile is asked for the device's own backend, and never for dynamic shapes."""
    seen: list[bool] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        seen.append(any(isinstance(size, torch.SymInt) for each in inputs for size in getattr(each, "shape", ())))
        return graph.forward

    torch._dynamo.register_backend(backend, name=device.NAME)
    trainer = trainer_on(device.NAME, "llama", folder, torch_compile=True, max_steps=2, static_lengths=[16, 32])
    trainer.train()
    assert seen and not any(seen), "compiled by the device's backend for static shapes"
    assert not trainer._loopwright.compiled.fell_back


@case
def adapters(folder: Path) -> None:
    """LoRA through PEFT: only the adapter is trained and saved."""
    peft = __import__("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    ends = []
    for kind in ("cpu", device.NAME):
        torch.manual_seed(0)
        model = peft.get_peft_model(llama(), config)
        trainer = trainer_on(kind, "llama", folder, cls=loopwright.NeuronTrainer, model=model, optim="adamw_torch")
        frozen = {n: p.detach().cpu().clone() for n, p in model.named_parameters() if not p.requires_grad}
        trainer.train()
        assert all(torch.equal(p.cpu(), frozen[n]) for n, p in trainer.model.named_parameters() if n in frozen)
        trainer.save_model(str(folder / f"adapter-{kind}"))
        assert (folder / f"adapter-{kind}" / "adapter_model.safetensors").is_file()
        ends.append(trainer.model)
    same(*ends)


@case
def compiled_beforehand(folder: Path) -> None:
    """precompile() leaves everything as it was."""
    plain = trainer_on(device.NAME, "dropped", folder / "a", cls=loopwright.NeuronTrainer, optim="adamw_torch")
    plain.train()
    ahead = trainer_on(device.NAME, "dropped", folder / "b", cls=loopwright.NeuronTrainer, optim="adamw_torch")
    ahead.precompile()
    assert ahead.state.log_history == []
    ahead.train()
    same(ahead.model, plain.model)
    assert losses(ahead) == losses(plain)


@case
def weights_kept_on_the_host(folder: Path) -> None:
    model = nn.Linear(3, 3).to(device.NAME)
    before = model.weight.detach().cpu()
    kept = KeptWeights([model], on_host=True)
    assert [copy.device.type for _, copy in kept._copies] == ["cpu", "cpu"]
    with torch.no_grad():
        model.weight.mul_(2)
    kept.restore()
    assert torch.equal(model.weight.detach().cpu(), before)


@case
def selfcheck(folder: Path) -> None:
    from loopwright.cli.commands.selfcheck import check

    report = check(str(folder))
    assert report["device"] == device.NAME and report["passed"], report
    assert report["largest_difference"] == 0.0


def main(library: str, folder: str) -> None:
    torch.set_num_threads(1)
    device.register(Path(library))
    assert str(torch.accelerator.current_accelerator()) == device.NAME
    for number, (name, function) in enumerate(CASES.items()):
        torch.manual_seed(0)
        try:
            with sdpa_kernel(SDPBackend.MATH):  # the CPU has a kernel of its own, which adds up in another order
                function(Path(folder) / str(number))
            problem = None
        except Exception:
            problem = traceback.format_exc()
        print("CASE " + json.dumps([name, problem]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

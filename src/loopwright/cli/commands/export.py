"""`loopwright export CONFIG --to FOLDER`: write the model of a run as a folder that other programs load."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from ...errors import ArgumentsError, CheckpointError, ModelError
from ..command import Result, Usage, Words, run_command

if TYPE_CHECKING:
    from ...config import Config
    from ...pt.trainer import Trainer

TOLERANCE = 1e-3
"""Largest difference of outputs after merging an adapter, relative to the largest output."""
USAGE = Usage(
    "export",
    "CONFIG --to FOLDER",
    "Write the newest checkpoint of a run, or with load_best_model_at_end the best one, as a folder with safetensors, "
    "configuration and tokenizer. An adapter is merged into the model, and the outputs of both are compared.",
    options={
        "--to=": "the new folder",
        "--checkpoint=": "another checkpoint",
        "--adapter": "write the adapter alone, without merging it",
    },
    takes_overrides=True,
)
TEXT_TASKS = ("causal-lm", "chat")


def run(words: list[str]) -> int:
    """Write the folder; returns the exit code."""
    return run_command(USAGE, words, _export)


def _export(words: Words) -> Result:
    from ...config import load_config

    config = load_config(words.first("the configuration file of the run"), words.overrides)
    target = _target(words)
    if config.lora is None and "--adapter" in words.options:
        raise ArgumentsError(f"--adapter: {config.path} has no block 'lora', so the run has no adapter; leave it out")
    full = _without_quantization(config)
    trainer, checkpoint = loaded_trainer(full, words.options.get("--checkpoint"))
    words.is_input = False
    data: dict[str, Any] = {"checkpoint": str(checkpoint), "folder": str(target)}
    if config.lora is not None and "--adapter" not in words.options:
        data["difference"] = _merge(trainer)
        if full is not config:
            data["difference_to_quantized"] = _difference_to_trained(trainer, config, checkpoint)
    _write(trainer, target)
    data["commands"] = commands(config, target) if "--adapter" not in words.options else {}
    lines = [f"{checkpoint} -> {target}"]
    if "difference" in data:
        lines.append(f"the adapter was merged; the outputs differ by at most {data['difference']:.2g} (relative)")
    if "difference_to_quantized" in data:
        lines.append(
            f"it was merged into the weights before quantization; the outputs differ by "
            f"{data['difference_to_quantized']:.2g} (relative) from those of the quantized model that was trained"
        )
    return Result(data, "\n".join([*lines, *(f"{use}: {command}" for use, command in data["commands"].items())]))


def _target(words: Words) -> Path:
    text = words.options.get("--to")
    if not isinstance(text, str) or not text:
        raise ArgumentsError("loopwright export needs --to FOLDER, the folder to write")
    path = Path(text)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ArgumentsError(f"{path} exists and is not an empty folder; choose another name")
    return path


def _without_quantization(config: Config) -> Config:
    """4-bit weights are for training: an adapter is merged into the weights they were made of."""
    if config.lora is None or config.lora.quantization is None:
        return config
    return dataclasses.replace(config, lora=dataclasses.replace(config.lora, quantization=None))


def loaded_trainer(config: Config, wanted: str | bool | None) -> tuple[Trainer, Path]:
    """The trainer of a configuration with the weights of a checkpoint of its run."""
    from ...config import build_trainer
    from ...core.checkpoint.manager import CheckpointManager, get_last_checkpoint
    from ...notices import Notices

    folder = str(config.args.output_dir)
    if not os.path.isdir(folder):
        raise CheckpointError(f"there is no run in {folder!r}; train first: loopwright train {config.path}")
    manager = CheckpointManager(folder, notices=Notices())
    chosen = wanted if isinstance(wanted, str) else get_last_checkpoint(folder)
    if chosen is None:
        raise CheckpointError(f"{folder} has no checkpoint; train first: loopwright train {config.path}")
    found = manager.local(chosen, asked_by="--checkpoint=")
    if config.args.load_best_model_at_end and not isinstance(wanted, str):
        found = manager.find(_best_beside(Path(found))) or found
    trainer = build_trainer(config)
    trainer._load_from_checkpoint(found)
    return trainer, Path(found)


def _best_beside(newest: Path) -> str | None:
    """The checkpoint of the best evaluation until the newest checkpoint; None if there was no evaluation."""
    from ...core.checkpoint.folder import STATE, folder_name

    step = json.loads((newest / STATE).read_text(encoding="utf-8")).get("best_global_step")
    return str(newest.parent / folder_name(step)) if isinstance(step, int) else None


def _merge(trainer: Trainer) -> float:
    """Merge the adapter into the model; returns the relative difference of the outputs."""
    import torch

    batch = _one_sample(trainer)
    model = trainer.model.eval()
    with torch.no_grad():
        before = _outputs(model, batch)
        merged = model.merge_and_unload()
        after = _outputs(merged, batch)
    difference = float((before - after).abs().max() / before.abs().max().clamp(min=1e-12))
    if not difference <= TOLERANCE:
        raise ModelError(
            f"merging the adapter changes the outputs by {difference:.2g} (relative), more than {TOLERANCE}; nothing "
            "was written. Write the adapter alone with --adapter"
        )
    trainer.model = merged
    return difference


def _difference_to_trained(trainer: Trainer, config: Config, checkpoint: Path) -> float:
    """How far the outputs are from those of the quantized model, relative to the largest."""
    import torch

    trained, _ = loaded_trainer(config, str(checkpoint))
    batch = _one_sample(trainer)
    with torch.no_grad():
        before, after = _outputs(trained.model.eval(), batch), _outputs(trainer.model.eval(), batch)
    return float((before - after).abs().max() / before.abs().max().clamp(min=1e-12))


def _one_sample(trainer: Trainer) -> Any:
    return trainer._prepare_inputs(trainer.data_collator([trainer._loopwright.data.training_data()[0]]))


def _outputs(model: Any, batch: Any) -> Any:
    output = model(**batch)
    logits = output["logits"] if "logits" in output else output["start_logits"]
    return logits.float()


def _write(trainer: Trainer, target: Path) -> None:
    """Write the model beside its place first, so that an incomplete folder never has its name."""
    from ...pt.checkpoint.weights import export_writer

    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        export_writer(trainer.model, trainer.model.state_dict())(temporary)
        if hasattr(trainer.processing_class, "save_pretrained"):
            trainer.processing_class.save_pretrained(str(temporary))
        if target.is_dir():
            target.rmdir()
        os.replace(temporary, target)
    except OSError as error:
        raise ArgumentsError(
            f"--to {target} cannot be written ({error.strerror or error}); choose another folder"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def commands(config: Config, target: Path) -> dict[str, str]:
    """What to run next: loopwright converts and serves nothing itself."""
    if config.task.name not in TEXT_TASKS:
        return {}
    folder, file = quote(str(target)), quote(f"{target}.gguf")
    return {
        "GGUF, with llama.cpp": f"python llama.cpp/convert_hf_to_gguf.py {folder} --outfile {file}",
        "server, with vLLM": f"vllm serve {folder}",
    }

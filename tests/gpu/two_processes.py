"""What the ranks of `test_two_processes.py` run: a small Llama of mixed lengths, trained in one of several ways.

    two_processes.py FOLDER CASE ...      cases: ddp, fsdp, single, killed; --cpu to try the script itself
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[2])]

from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.pt.tensor_hashes import hashes
from tests.models import VOCAB, pad, samples

LENGTHS = [3 + (7 * k) % 61 for k in range(64)]
STEPS, SAVED = 6, 3


def small_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    return LlamaForCausalLM(LlamaConfig(vocab_size=max(VOCAB, 32), num_hidden_layers=2, **sizes))


class Killed(TrainerCallback):
    """Ends rank 1 as the system does when memory runs out."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == SAVED and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, case: str, on_cpu: bool, resume: Any = None) -> dict[str, Any]:
    options: dict[str, Any] = {"fsdp": True} if case == "fsdp" else {}
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=8 if case == "single" else 4, max_steps=STEPS, save_steps=SAVED,
        logging_steps=1, learning_rate=1e-3, lr_scheduler_type="constant", bf16=not on_cpu, use_cpu=on_cpu,
        disable_tqdm=True, report_to=[], speed="max", include_num_input_tokens_seen="non_padding", **options,
    )  # fmt: skip
    callbacks = [Killed()] if case == "killed" else []
    trainer = Trainer(small_llama(), args, pad, samples(LENGTHS), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    weights = {name: full(tensor) for name, tensor in trainer.model.state_dict().items()}
    return {
        "strategy": type(trainer._loopwright.strategy).__name__,
        "device": str(args.device),
        "backend": backend(args.device),
        "step": trainer.state.global_step,
        "losses": [row["loss"] for row in rows],
        "norms": [row["grad_norm"] for row in rows],
        "weights": {name: tensor.double().abs().sum().item() for name, tensor in weights.items()},
        "hashes": hashes(weights),
        "plan": trainer._loopwright.run.speed_plan,
    }


def full(tensor: Any) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu()


def backend(device: torch.device) -> str | None:
    import torch.distributed as dist

    return dist.group.WORLD._get_backend(device).name() if dist.is_initialized() else None


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--cpu"]
    folder, cases, rank = Path(words[0]), words[1:], os.environ.get("RANK", "0")
    for case in cases:
        found = {"whole": train(folder / case, case, "--cpu" in sys.argv)}
        write(folder / f"{case}-{rank}.json", found)
        if case != "single":
            checkpoint = str(folder / case / f"checkpoint-{SAVED}")
            found["resumed"] = train(folder / f"{case}-resumed", case, "--cpu" in sys.argv, resume=checkpoint)
        write(folder / f"{case}-{rank}.json", found)


def write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()

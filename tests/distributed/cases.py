"""What the processes of the pool run: each function is one case, called on every process with the same arguments."""

from __future__ import annotations

import os
import signal
from typing import Any

from pt.tiny import VOCAB, Tokens, llama, made, samples, trainer_of
from torch import Tensor, nn
from torch.nn import functional as F

import loopwright

LENGTHS = (11, 5, 17, 3, 29, 8, 2, 9, 4, 13, 7, 6, 10, 12, 1, 15, 21, 14, 19, 16)
TIMES = ("runtime", "per_second")


class Blocks(nn.Module):
    """Two repeated blocks between embedding and head, with sizes that do not divide by 2, 3 or 4."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 10), nn.Tanh(), nn.Linear(10, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, VOCAB)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def summed_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
    logits = outputs["logits"]
    total = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def divided_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
    total, count = summed_loss(outputs, labels)
    return total / (num_items_in_batch if num_items_in_batch is not None else count)


LOSSES = {"model": None, "pair": summed_loss, "divided": divided_loss}


def small_llama(**options: Any) -> nn.Module:
    return llama(**{"vocab_size": 14, "num_key_value_heads": 2, **options})


def small_qwen() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=14, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=2, head_dim=4, intermediate_size=16, max_position_embeddings=128,
                         pad_token_id=0, initializer_range=0.3)  # fmt: skip
    return made(Qwen3ForCausalLM, config)


MODELS = {
    "tokens": lambda: made(Tokens),
    "blocks": lambda: made(Blocks),
    "blocks-single": lambda: made(Blocks).float(),
    "llama": small_llama,
    "llama-tied": lambda: small_llama(tie_word_embeddings=True),
    "qwen3": small_qwen,
}


def trained(
    folder: str,
    *,
    n: int = 13,
    model: str = "blocks",
    loss: str = "model",
    resume: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train as the arguments say; returns full weights, what was logged and where the run stands."""
    data = samples(LENGTHS[:n])
    given: dict[str, Any] = {"num_train_epochs": 2, "optim": "adamw_torch", "learning_rate": 0.01, "max_grad_norm": 1.0,
             "lr_scheduler_type": "linear", "train_sampling_strategy": "random"}  # fmt: skip
    if LOSSES[loss] is not None:
        given["compute_loss_func"] = LOSSES[loss]
    trainer = trainer_of(MODELS[model](), data, folder, **{**given, **options})
    trainer.train(resume_from_checkpoint=resume)
    return result_of(trainer)


def result_of(trainer: Any) -> dict[str, Any]:
    return {
        "weights": full_weights(trainer.model),
        "logs": [{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in trainer.state.log_history],
        "step": trainer.state.global_step,
        "samples": trainer.progress.samples_seen,
        "strategy": type(trainer.strategy).__name__,
    }


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = whole.detach().clone()
    return found


# ---- faults ----------------------------------------------------------------------------------------------------------


class At(loopwright.TrainerCallback):
    """Does something at the end of an update, on one process."""

    def __init__(self, step: int, rank: int, action: Any) -> None:
        self.step, self.rank, self.action = step, rank, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and args.process_index == self.rank:
            self.action()


def fail() -> None:
    raise ValueError("the disk of this machine is upside down")


def stopped(folder: str, *, how: str, rank: int, step: int = 3, **options: Any) -> dict[str, Any]:
    """A run in which something happens to one process."""
    actions = {"fail": fail, "term": lambda: os.kill(os.getpid(), signal.SIGTERM), "nothing": lambda: None}
    return trained(folder, callbacks=[At(step, rank, actions[how])], **options)

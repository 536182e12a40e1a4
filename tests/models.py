"""Tiny models, data for them, and builders of trainers, for any test.

First models in double precision with samples of any length, and a trainer with nothing but the asked-for arguments.
Then models in single precision with data that transformers' trainer runs as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import loopwright

VOCAB = 13
LENGTHS = (11, 101, 5, 17, 3, 29, 8)
CPU = {
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "report_to": [],
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "learning_rate": 0.1,
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "train_sampling_strategy": "sequential",
}


class Tokens(nn.Module):
    """Embedding and head; its loss is the mean over its targets, with or without the causal shift."""

    shift = False

    def __init__(self, vocab: int = VOCAB, width: int = 6) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(vocab, width), nn.Linear(width, width), nn.Linear(width, vocab)

    def logits(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(input_ids))))

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        if labels is None:
            return {"logits": logits}
        total, count = summed(logits, labels, shift=self.shift)
        return {"loss": total / count, "logits": logits}


class ShiftedTokens(Tokens):
    shift = True


class SilentTokens(Tokens):
    """Never computes a loss."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": self.logits(input_ids)}


def summed(logits: Tensor, labels: Tensor, *, shift: bool = False, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The summed cross entropy and the number of its targets."""
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum", label_smoothing=smoothing)
    return total, (labels != -100).sum()


def samples(lengths: Sequence[int] = LENGTHS, *, classes: bool = False, ignored: int = 0) -> list[dict[str, Tensor]]:
    """Sequences of these lengths; the first `ignored` targets of each are -100."""
    g = torch.Generator().manual_seed(3)
    made = []
    for length in lengths:
        ids = torch.randint(1, VOCAB, (length,), generator=g)
        labels = torch.randint(0, VOCAB, (length,), generator=g)
        labels[:ignored] = -100
        made.append({"input_ids": ids, "labels": labels[0] % 3 if classes else labels})
    return made


def pad(features: list[dict[str, Tensor]], to: int = 0) -> dict[str, Tensor]:
    """A padded batch: to its own longest sample, or to a fixed width."""
    width = max(to, *(len(each["input_ids"]) for each in features))

    def stretch(row: Tensor, value: int) -> Tensor:
        return row if row.dim() == 0 else F.pad(row, (0, width - len(row)), value=value)

    batch = {
        "input_ids": torch.stack([stretch(each["input_ids"], 0) for each in features]),
        "attention_mask": torch.stack([stretch(torch.ones_like(each["input_ids"]), 0) for each in features]),
        "labels": torch.stack([stretch(each["labels"], -100) for each in features]),
    }
    return batch


def pad_wide(features: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return pad(features, to=104)


class Watch(loopwright.TrainerCallback):
    """Keeps the gradients of every update, and counts events."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.micro_batches = self.samples = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.gradients.append(gradients_of(model))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trainer_of(
    model: nn.Module, data: Any, folder: Any, *, cls: type = loopwright.Trainer, collator: Any = pad, **options: Any
) -> Any:
    """A trainer on a copy of the model; options that are no arguments go to the constructor."""
    own = ("callbacks", "compute_loss_func", "eval_dataset", "compute_metrics", "optimizers", "model_init",
           "preprocess_logits_for_metrics")  # fmt: skip
    given = {name: options.pop(name) for name in own if name in options}
    args = loopwright.TrainingArguments(output_dir=str(folder), **{**CPU, **options})
    model = None if "model_init" in given else copy.deepcopy(model)
    return cls(model=model, args=args, data_collator=collator, train_dataset=data, **given)


def trained_gradients(model: nn.Module, data: Any, folder: Any, **options: Any) -> list[dict[str, Tensor]]:
    """The gradients of every update of one epoch; the weights stay where they are."""
    watch = Watch()
    trainer = trainer_of(
        model, data, folder, callbacks=[watch], **{"learning_rate": 0.0, "num_train_epochs": 1, **options}
    )
    trainer.train()
    return watch.gradients


def gradients_from(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """The gradients of a loss computed by hand."""
    model = copy.deepcopy(model).train()
    loss(model).backward()
    return gradients_of(model)


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert ours.keys() == theirs.keys() and ours
    assert max(float(each.abs().max()) for each in theirs.values()) > 1e-4, "these gradients would equal anything"
    for name in ours:
        worst = float((ours[name] - theirs[name]).abs().max())
        assert worst <= tolerance, f"{name} differs by {worst}"


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def made(cls: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    torch.manual_seed(5)
    return cls(*args, **kwargs).double()


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 128,
             "pad_token_id": 0, "initializer_range": 0.3}  # fmt: skip
    return made(LlamaForCausalLM, LlamaConfig(**{**sizes, **options}))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return made(GPT2LMHeadModel, GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=2, n_positions=128,
                                            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))  # fmt: skip


def bert_config(labels: int) -> Any:
    from transformers import BertConfig

    return BertConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                      intermediate_size=16, max_position_embeddings=128, num_labels=labels,
                      hidden_dropout_prob=0, attention_probs_dropout_prob=0)  # fmt: skip


def bert_tokens() -> nn.Module:
    from transformers import BertForTokenClassification

    return made(BertForTokenClassification, bert_config(VOCAB))


def bert_classes() -> nn.Module:
    from transformers import BertForSequenceClassification

    return made(BertForSequenceClassification, bert_config(3))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return made(T5ForConditionalGeneration, T5Config(vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=16, num_layers=1,
                                                     num_heads=2, dropout_rate=0, decoder_start_token_id=0,
                                                     pad_token_id=0))  # fmt: skip


# ---- in single precision --------------------------------------------------------------------------------------------


class Regression(nn.Module):
    """y = Wx + b with an optional dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y = self.out(self.dropout(torch.tanh(self.hidden(x)))).squeeze(-1)
        outputs = {"y": y}
        return outputs if labels is None else {"loss": F.mse_loss(y, labels), **outputs}


def regression_data(n: int) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=g)
    return [{"x": x[i], "labels": x[i].sum()} for i in range(n)]


def token_data(n: int, *, labels: str, length: int = 12, vocab: int = 50) -> list[dict[str, Any]]:
    """Padded token sequences of different lengths; labels per sequence or per token."""
    g = torch.Generator().manual_seed(2)
    samples = []
    for _ in range(n):
        real = int(torch.randint(4, length + 1, (1,), generator=g))
        ids = torch.randint(3, vocab, (length,), generator=g)
        mask = (torch.arange(length) < real).long()
        ids = ids * mask
        target = torch.randint(0, 3, (), generator=g) if labels == "class" else torch.where(mask == 1, ids, -100)
        samples.append({"input_ids": ids, "attention_mask": mask, "labels": target})
    return samples


def small_bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=32, num_labels=3, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip


def small_llama(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=32, max_position_embeddings=32, attention_dropout=dropout, pad_token_id=0,
        )
    )  # fmt: skip


def small_t5(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=dropout,
            decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A model and its data."""

    model: Callable[[float], nn.Module]
    data: Callable[[int], list[dict[str, Any]]]


TASKS = {
    "regression": Task(Regression, regression_data),
    "bert": Task(small_bert, lambda n: token_data(n, labels="class")),
    "llama": Task(small_llama, lambda n: token_data(n, labels="token")),
    "t5": Task(small_t5, lambda n: token_data(n, labels="token")),
}


def regression_run(
    folder: Any, *, cls: Any = loopwright.Trainer, model: Any = None, callbacks: Any = None, n: int = 40, **options: Any
) -> Any:
    """A trainer that has trained a regression."""
    defaults = {"per_device_train_batch_size": 4, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True,
                "learning_rate": 1e-2, "save_steps": 2}  # fmt: skip
    args = loopwright.TrainingArguments(str(folder), **{**defaults, **options})
    data = regression_data(n)
    trainer = cls(model or Regression(), args, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks)
    trainer.train()
    return trainer


class StopAt(loopwright.TrainerCallback):
    """Saves and stops after a step, as a signal would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def logged(trainer: Any, key: str) -> list[Any]:
    return [row[key] for row in trainer.state.log_history if key in row]


def losses(trainer: Any) -> list[float]:
    return logged(trainer, "loss")


def kept(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder."""
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))

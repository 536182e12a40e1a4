"""What a contract test needs of a framework: tiny models with given weights, a trainer, and its numbers as arrays.

Frameworks are imported when they are used: a process that runs no test of theirs does not pay for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

VOCAB = 11
IGNORED = -100

QUIET = {
    "disable_tqdm": True,
    "report_to": [],
    "use_cpu": True,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
}

OWN = ("callbacks", "compute_metrics", "compute_loss_func", "data_collator", "model_init", "optimizers",
       "preprocess_logits_for_metrics")  # fmt: skip
"""Options that go to the constructor."""


def rows(n: int, *, noisy: bool = False) -> Any:
    """Samples of a linear task, one dict each; noisy ones draw from numpy's stream whenever they are loaded."""
    return Rows(n) if noisy else [Rows(n)[i] for i in range(n)]


class Rows:
    """A map-style dataset whose samples draw from numpy's stream."""

    noise = 0.0

    def __init__(self, n: int, noise: float = 0.0) -> None:
        self.n, self.noise = n, noise

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.n:
            raise IndexError(index)
        x = np.random.default_rng(100 + index).normal(size=4).astype(np.float32)
        noise = np.float32(self.noise * np.random.rand()) if self.noise else np.float32(0)
        return {"x": x + noise, "labels": x.sum(keepdims=True)}


def sentences(n: int = 12, width: int = 6) -> list[dict[str, Any]]:
    """Token sequences of one width, of whose labels another number counts in each."""
    random = np.random.default_rng(3)
    made = []
    for index in range(n):
        ids = random.integers(1, VOCAB, width)
        labels = random.integers(0, VOCAB, width)
        labels[: index % width] = IGNORED
        made.append({"input_ids": ids, "labels": labels})
    return made


def initial(*shapes: tuple[int, ...]) -> list[Any]:
    """The same weights for every framework."""
    random = np.random.default_rng(7)
    return [(random.normal(size=shape) * 0.4).astype(np.float32) for shape in shapes]


NET = ((4, 8), (8,), (8, 1), (1,))
TOKENS = ((VOCAB, 6), (6, VOCAB), (VOCAB,))


class Torch:
    """PyTorch."""

    name = "torch"

    def seed(self) -> None:
        import torch

        torch.manual_seed(0)
        np.random.seed(0)

    def net(self, dropout: float = 0.0) -> Any:
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.hidden, self.out, self.dropout = nn.Linear(4, 8), nn.Linear(8, 1), nn.Dropout(dropout)

            def forward(self, x: Any, labels: Any = None) -> Any:
                y = self.out(self.dropout(torch.tanh(self.hidden(x))))
                loss = None if labels is None else nn.functional.mse_loss(y, labels)
                return {"logits": y} if loss is None else {"loss": loss, "logits": y}

        model = Net()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), initial(*NET), strict=True):
                value = torch.from_numpy(value)
                parameter.copy_(value.T if value.dim() == 2 else value)
        return model

    def tokens(self) -> Any:
        import torch
        from torch import nn

        class Tokens(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.head = nn.Embedding(VOCAB, 6), nn.Linear(6, VOCAB)

            def forward(self, input_ids: Any, labels: Any = None) -> Any:
                logits = self.head(torch.tanh(self.embed(input_ids)))
                flat = logits.reshape(-1, VOCAB)
                loss = None if labels is None else nn.functional.cross_entropy(flat, labels.reshape(-1))
                return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}

        model = Tokens()
        embed, kernel, bias = (torch.from_numpy(value) for value in initial(*TOKENS))
        with torch.no_grad():
            model.embed.weight.copy_(embed)
            model.head.weight.copy_(kernel.T)
            model.head.bias.copy_(bias)
        return model

    def trainer_class(self) -> Any:
        from loopwright import Trainer

        return Trainer

    def arguments(self, folder: Any, **options: Any) -> Any:
        from loopwright import TrainingArguments

        return TrainingArguments(str(folder), **{**QUIET, **options})

    def trainer(
        self, folder: Any, model: Any, data: Any, *, cls: Any = None, evaluation: Any = None, **more: Any
    ) -> Any:
        self.seed()
        given = {name: more.pop(name) for name in OWN if name in more}
        args = self.arguments(folder, **more)
        return (cls or self.trainer_class())(model, args, train_dataset=data, eval_dataset=evaluation, **given)

    def weights(self, trainer: Any) -> list[Any]:
        """All weights, in the layout that other frameworks share."""
        named = trainer.model.named_parameters()
        return [_shared(value.detach().numpy().copy(), "embed" in name) for name, value in named]

    def memory(self, trainer: Any) -> list[Any]:
        """What the optimizer remembers."""
        state = trainer.optimizer.state_dict()["state"]
        return [np.asarray(value) for _, slots in sorted(state.items()) for _, value in sorted(slots.items())]

    def draws(self) -> list[float]:
        """The next number of every random stream."""
        import torch

        return [float(np.random.rand()), torch.rand(()).item()]


def _shared(value: Any, embedding: bool) -> Any:
    return value.T if value.ndim == 2 and not embedding else value


class TensorFlow(Torch):
    """TensorFlow with Keras 3."""

    name = "tensorflow"

    def seed(self) -> None:
        import keras

        keras.utils.set_random_seed(0)

    def net(self, dropout: float = 0.0, compiled: bool = True) -> Any:
        import keras

        self.seed()
        layers = keras.layers
        middle = [layers.Dropout(dropout, seed=1)] if dropout else []
        model = keras.Sequential(
            [keras.Input((4,), name="x"), layers.Dense(8, activation="tanh"), *middle, layers.Dense(1)]
        )
        if compiled:
            model.compile(loss="mse")
        for variable, value in zip(model.trainable_variables, initial(*NET), strict=True):
            variable.assign(value)
        return model

    def tokens(self) -> Any:
        import keras

        layers = keras.layers
        ids = keras.Input((None,), dtype="int32", name="input_ids")
        hidden = layers.Activation("tanh")(layers.Embedding(VOCAB, 6)(ids))
        model = keras.Model(ids, layers.Dense(VOCAB)(hidden))
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=IGNORED))
        for variable, value in zip(model.trainable_variables, initial(*TOKENS), strict=True):
            variable.assign(value)
        return model

    def trainer_class(self) -> Any:
        from loopwright import TFTrainer

        return TFTrainer

    def arguments(self, folder: Any, **options: Any) -> Any:
        from loopwright import TFTrainingArguments

        return TFTrainingArguments(str(folder), **{**QUIET, **options})

    def weights(self, trainer: Any) -> list[Any]:
        return [variable.numpy() for variable in trainer.model.trainable_variables]

    def memory(self, trainer: Any) -> list[Any]:
        return [variable.numpy() for variable in [*trainer.optimizer.variables, *trainer.model.non_trainable_variables]]

    def draws(self) -> list[float]:
        import tensorflow as tf

        return [float(np.random.rand()), float(tf.random.get_global_generator().uniform(()))]


FRAMEWORKS = {each.name: each() for each in (Torch, TensorFlow)}

needs_tensorflow = [
    pytest.mark.xdist_group("tensorflow"),
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
"""Marks of every test that imports TensorFlow: one worker imports it, and without it the test is skipped."""

BOTH = [pytest.param("torch", id="torch"), pytest.param("tensorflow", id="tensorflow", marks=needs_tensorflow)]


MOSTLY_TORCH = [BOTH[0], pytest.param("tensorflow", id="tensorflow", marks=[*needs_tensorflow, pytest.mark.grid])]
"""For what the core does: with TensorFlow by `-m grid` only."""


def spread(cases: Iterable[Any], with_tensorflow: Any = None) -> list[Any]:
    """Pairs of a framework and a case: all cases with PyTorch, at most one with TensorFlow, which traces long."""
    pairs = []
    for case in cases:
        rest = [] if case == with_tensorflow else [pytest.mark.grid]
        name = getattr(case, "name", case)
        pairs.append(pytest.param("torch", case, id=f"torch-{name}"))
        pairs.append(pytest.param("tensorflow", case, id=f"tensorflow-{name}", marks=[*needs_tensorflow, *rest]))
    return pairs

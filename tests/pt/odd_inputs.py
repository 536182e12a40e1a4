"""Odd datasets, collators, models, metrics, callbacks, optimizers and schedules: each is a training that may fail."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from loopwright import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from tests.models import Regression, regression_data

DATA = regression_data(8)
X, Y = DATA[0]["x"], DATA[0]["labels"]

CASES: dict[str, Callable[[], Any]] = {}
"""Every case by its name; it trains, evaluates where it says so, and may raise."""


def train(model: Any = None, data: Any = DATA, *, evaluate: bool = False, options: Any = None, **given: Any) -> Any:
    """A training of three updates, with odd parts."""
    args = TrainingArguments(
        "run",
        **{
            "max_steps": 3,
            "logging_steps": 1,
            "use_cpu": True,
            "disable_tqdm": True,
            "save_steps": 2,
            **(options or {}),
        },
    )
    model = None if "model_init" in given else Regression() if model is None else model
    trainer = Trainer(model, args, train_dataset=data, **({"eval_dataset": DATA} if evaluate else {}), **given)
    trainer.train()
    if evaluate:
        trainer.evaluate()
    return trainer


def case(name: str, run: Callable[[], Any]) -> None:
    assert name not in CASES, name
    CASES[name] = run


# ---- datasets -------------------------------------------------------------------------------------------------------


class Samples(Dataset[Any]):
    """A map-style dataset made of functions."""

    def __init__(self, length: Any, item: Callable[[int], Any] = lambda i: DATA[i % 8]) -> None:
        self._length, self._item = length, item

    def __len__(self) -> Any:
        if isinstance(self._length, Exception):
            raise self._length
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._item(index)


class Stream(IterableDataset[Any]):
    """A stream made of a function."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


class LyingStream(Stream):
    """A stream whose length is wrong."""

    def __init__(self, make: Callable[[], Iterator[Any]], length: Any) -> None:
        super().__init__(make)
        self._length = length

    def __len__(self) -> Any:
        return self._length


def forever() -> Iterator[Any]:
    while True:
        yield DATA[0]


USED = iter(DATA)


def breaks_after(samples: int) -> Iterator[Any]:
    yield from DATA[:samples]
    raise OSError("the connection was closed")


def failing(error: Exception, at: int = 5) -> Callable[[int], Any]:
    def item(index: int) -> Any:
        if index == at:
            raise error
        return DATA[index]

    return item


LENGTHS: dict[str, Any] = {
    "zero": 0,
    "negative": -3,
    "float": 8.0,
    "none": None,
    "text": "8",
    "raises TypeError": TypeError("no length"),
    "raises ValueError": ValueError("no length"),
    "raises RuntimeError": RuntimeError("closed"),
    "numpy": np.int64(8),
    "tensor": torch.tensor(8),
    "too long": 20,
    "3e8": 300_000_000,
    "2**62": 2**62,
    "2**80": 2**80,
}
for name, length in LENGTHS.items():
    case(f"dataset: length {name}", lambda length=length: train(data=Samples(length)))
case("dataset: length 3e8, workers", lambda: train(data=Samples(300_000_000), options={"dataloader_num_workers": 2}))
case(
    "dataset: length 3e8, in order",
    lambda: train(data=Samples(300_000_000), options={"train_sampling_strategy": "sequential"}),
)
case("dataset: length 3e8, stopped inside", lambda: train(data=Samples(300_000_000), options={"eval_on_start": False}))

ITEMS: dict[str, Any] = {
    "None": None,
    "text": "a sample",
    "int": 3,
    "float": 1.5,
    "bytes": b"abc",
    "empty dict": {},
    "empty tuple": (),
    "tuple": (X, Y),
    "list": [X, Y],
    "nested": {"x": {"deep": X}, "labels": Y},
    "list of lists": {"x": [[1.0]], "labels": Y},
    "object dtype": {"x": np.array([1, "a", None], dtype=object), "labels": Y},
    "object": {"x": object(), "labels": Y},
    "bytes column": {"x": b"1234", "labels": Y},
    "text column": {"x": "word", "labels": Y},
    "0-d": {"x": torch.tensor(1.0), "labels": Y},
    "NaN": {"x": torch.full((4,), float("nan")), "labels": Y},
    "inf": {"x": torch.full((4,), float("inf")), "labels": Y},
    "complex": {"x": torch.zeros(4, dtype=torch.complex64), "labels": Y},
    "sparse": {"x": X.to_sparse(), "labels": Y},
    "requires grad": {"x": X.clone().requires_grad_(), "labels": Y},
    "meta": {"x": X.to("meta"), "labels": Y},
    "integer": {"x": X.long(), "labels": Y},
    "half": {"x": X.half(), "labels": Y},
    "bool": {"x": X.bool(), "labels": Y},
    "double": {"x": X.double(), "labels": Y},
    "numpy": {"x": X.numpy(), "labels": Y.numpy()},
    "no labels": {"x": X},
    "None label": {"x": X, "labels": None},
    "other keys": {"a": X, "b": Y},
    "integer keys": {0: X, 1: Y},
    "wrong size": {"x": torch.zeros(5), "labels": Y},
    "empty tensor": {"x": torch.zeros(0), "labels": Y},
    "label of text": {"x": X, "labels": "positive"},
    "set": {"x": {1.0, 2.0}, "labels": Y},
    "generator": {"x": iter([1.0]), "labels": Y},
    "function": lambda: 1,
    "class": dict,
    "huge int": {"x": X, "labels": 10**30},
    "date": {"x": X, "labels": np.datetime64("2026-01-01")},
}
for name, sample in ITEMS.items():
    case(f"dataset: items {name}", lambda sample=sample: train(data=Samples(8, lambda i: sample)))
    if name in ("None", "tuple", "nested", "object", "NaN", "wrong size"):
        case(
            f"dataset: items {name}, workers",
            lambda sample=sample: train(data=Samples(8, lambda i: sample), options={"dataloader_num_workers": 1}),
        )

MIXED: dict[str, Any] = {
    "ragged": lambda i: {"x": torch.ones(4 + i % 2), "labels": Y},
    "keys differ": lambda i: {"x": X, "labels": Y, **({"z": X} if i % 2 else {})},
    "keys are missing": lambda i: DATA[i] if i % 2 else {"x": X},
    "types differ": lambda i: DATA[i] if i % 2 else (X, Y),
    "dtypes differ": lambda i: {"x": X.double() if i % 2 else X, "labels": Y},
    "None at times": lambda i: DATA[i] if i % 2 else None,
    "raises ValueError": failing(ValueError("item is broken")),
    "raises KeyError": failing(KeyError("column")),
    "raises IndexError": failing(IndexError("out of range")),
    "raises OSError": failing(OSError(5, "Input/output error")),
    "raises StopIteration": failing(StopIteration()),
    "raises MemoryError": failing(MemoryError()),
    "raises an error of its own": failing(type("Own", (Exception,), {"__init__": lambda self, a, b: None})(1, 2)),
    "raises a unicode error": failing(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")),
    "recursion": lambda i: (_ for _ in ()).throw(RecursionError()),
}
for name, item in MIXED.items():
    case(f"dataset: {name}", lambda item=item: train(data=Samples(8, item)))
    case(
        f"dataset: {name}, workers",
        lambda item=item: train(data=Samples(8, item), options={"dataloader_num_workers": 1}),
    )


class FetchesMany(Samples):
    """A dataset that loads batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self._item(index) for index in indices]


case("dataset: a batch raises", lambda: train(data=FetchesMany(8, failing(ValueError("broken")))))
case("dataset: a batch has one sample too few", lambda: train(data=_few()))


def _few() -> Any:
    found = FetchesMany(8)
    found.__class__ = type("Few", (FetchesMany,), {"__getitems__": lambda self, indices: [DATA[0]]})
    return found


def _frame() -> Any:
    import pandas

    return pandas.DataFrame({"x": [1.0, 2.0], "labels": [0.0, 1.0]})


STREAMS: dict[str, Any] = {
    "generator": (each for each in DATA),
    "iterator": iter(DATA),
    "dict of columns": {"x": X, "labels": Y},
    "dict of datasets": {"a": DATA, "b": DATA},
    "text": "data/train.json",
    "path": Path("data"),
    "int": 5,
    "bytes": b"data",
    "set": {1, 2},
    "tuple of samples": tuple(DATA),
    "numpy": np.zeros((8, 4)),
    "tensor": torch.zeros(8, 4),
    "class": Samples,
    "function": lambda: DATA,
    "object": object(),
    "nested list": [DATA],
    "list of None": [None] * 8,
    "range": range(8),
    "model": Regression(),
}
for name, thing in STREAMS.items():
    case(f"dataset: a {name}", lambda thing=thing: train(data=thing))
case("dataset: a pandas frame", lambda: train(data=_frame()))
case("stream: infinite", lambda: train(data=Stream(forever)))
case("stream: infinite without max_steps", lambda: train(data=Stream(forever), options={"max_steps": -1}))
case("stream: length too large", lambda: train(data=LyingStream(lambda: iter(DATA), 1000), options={"max_steps": -1}))
case("stream: length too small", lambda: train(data=LyingStream(lambda: iter(DATA), 1), options={"max_steps": -1}))
case("stream: length negative", lambda: train(data=LyingStream(lambda: iter(DATA), -4), options={"max_steps": -1}))
case("stream: length text", lambda: train(data=LyingStream(lambda: iter(DATA), "8"), options={"max_steps": -1}))
case("stream: used up", lambda: train(data=Stream(lambda: USED), options={"max_steps": 30}))
case("stream: empty", lambda: train(data=Stream(lambda: iter([]))))
case("stream: iter returns None", lambda: train(data=Stream(lambda: None)))  # type: ignore[arg-type, return-value]
case("stream: iter raises", lambda: train(data=Stream(lambda: 1 / 0)))  # type: ignore[arg-type, return-value]
case("stream: breaks", lambda: train(data=Stream(lambda: breaks_after(5))))
case(
    "stream: breaks, workers",
    lambda: train(data=Stream(lambda: breaks_after(5)), options={"dataloader_num_workers": 1}),
)
case("evaluation: dataset breaks", lambda: _evaluates(Samples(8, failing(ValueError("broken")))))
case("evaluation: empty", lambda: _evaluates([]))
case("evaluation: None items", lambda: _evaluates([None] * 4))
case("evaluation: text", lambda: _evaluates("validation"))
case("evaluation: other columns", lambda: _evaluates([{"a": X}] * 4))
case("evaluation: int", lambda: _evaluates(7))


def _evaluates(data: Any) -> None:
    args = TrainingArguments("run", use_cpu=True, disable_tqdm=True, max_steps=2, eval_strategy="steps", eval_steps=1)
    Trainer(Regression(), args, train_dataset=DATA, eval_dataset=data).train()


# ---- collators ------------------------------------------------------------------------------------------------------


def stacked(samples: list[Any]) -> dict[str, Any]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "labels")}


SHARED = {"x": torch.zeros(8, 4), "labels": torch.zeros(8)}


def _raises(error: Exception) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise error

    return function


COLLATORS: dict[str, Any] = {
    "returns None": lambda samples: None,
    "returns a list": list,
    "returns a tensor": lambda samples: torch.stack([s["x"] for s in samples]),
    "returns text": lambda samples: "batch",
    "returns an empty dict": lambda samples: {},
    "drops rows": lambda samples: stacked(samples[:1]),
    "doubles rows": lambda samples: stacked(samples * 2),
    "no rows": lambda samples: {"x": torch.zeros(0, 4), "labels": torch.zeros(0)},
    "meta device": lambda samples: {k: v.to("meta") for k, v in stacked(samples).items()},
    "shared memory": lambda samples: SHARED,
    "raises": _raises(ValueError("cannot collate")),
    "no parameter": {}.copy,
    "two parameters": lambda a, b: {},
    "returns a generator": lambda s: iter(s),
    "rows differ": lambda samples: {"x": torch.zeros(4, 4), "labels": torch.zeros(3)},
    "numpy": lambda s: {k: v.numpy() for k, v in stacked(s).items()},
    "nested": lambda samples: {"x": stacked(samples), "labels": torch.zeros(8)},
    "labels only": lambda s: {"labels": stacked(s)["labels"]},
    "tuple": lambda samples: tuple(stacked(samples).values()),
    "integer keys": lambda s: dict(enumerate(stacked(s).values())),
    "returns samples": lambda s: s[0],
}
for name, collator in COLLATORS.items():
    case(f"collator: {name}", lambda collator=collator: train(data_collator=collator))
case(
    "collator: raises, workers", lambda: train(data_collator=COLLATORS["raises"], options={"dataloader_num_workers": 1})
)
case("collator: not callable", lambda: train(data_collator="pad"))
case(
    "collator: unused columns kept",
    lambda: train(data_collator=COLLATORS["nested"], options={"remove_unused_columns": False}),
)


# ---- models ---------------------------------------------------------------------------------------------------------


class Made(nn.Module):
    """A linear model whose output is made by a function of its prediction."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 1), make

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.make(self.linear(x).squeeze(-1))


class Parameterless(nn.Module):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return {"loss": x.mean()}


class NoLabels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x)


class Tied(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.same = self.out


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return {"loss": (self.linear(x).squeeze(-1) - labels).pow(2).mean()}


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return {"loss": (x * self.weight).abs().mean()}


def _inference() -> Any:
    with torch.inference_mode():
        return Regression()


OUTPUTS: dict[str, Any] = {
    "None": lambda y: None,
    "loss None": lambda y: {"loss": None},
    "loss per sample": lambda y: {"loss": y},
    "loss text": lambda y: {"loss": "low"},
    "loss NaN": lambda y: {"loss": y.mean() * float("nan")},
    "loss inf": lambda y: {"loss": y.mean() * float("inf")},
    "loss negative": lambda y: {"loss": -y.pow(2).mean()},
    "loss detached": lambda y: {"loss": y.mean().detach()},
    "loss integer": lambda y: {"loss": y.mean().long()},
    "loss float": lambda y: {"loss": 1.0},
    "no loss": lambda y: {"logits": y},
    "tuple": lambda y: (y.mean(), y),
    "tuple without loss": lambda y: (y, y),
    "empty tuple": lambda y: (),
    "empty dict": lambda y: {},
    "loss of one element": lambda y: {"loss": y.mean().reshape(1)},
    "loss of shape (1, 1)": lambda y: {"loss": y.mean().reshape(1, 1)},
    "loss complex": lambda y: {"loss": y.mean().to(torch.complex64)},
    "loss dict": lambda y: {"loss": {"a": y.mean()}},
    "loss list": lambda y: {"loss": [y.mean()]},
    "loss bool": lambda y: {"loss": True},
    "raises ValueError": _raises(ValueError("bad forward")),
    "raises RuntimeError": _raises(RuntimeError("shape mismatch")),
    "raises KeyError": _raises(KeyError("x")),
    "raises StopIteration": _raises(StopIteration()),
    "assertion": _raises(AssertionError()),
    "loss empty": lambda y: {"loss": y[:0]},
    "loss double": lambda y: {"loss": y.double().mean()},
    "loss half": lambda y: {"loss": y.half().mean()},
    "loss meta": lambda y: {"loss": y.mean().to("meta")},
    "loss numpy": lambda y: {"loss": np.float32(1)},
    "int": lambda y: 3,
    "loss None in tuple": lambda y: (None, y),
}
for name, make in OUTPUTS.items():
    case(f"model: {name}", lambda make=make: train(Made(make)))
    case(
        f"model: {name}, accumulation",
        lambda make=make: train(
            Made(make), options={"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
        ),
    )
case("model: no parameters", lambda: train(Parameterless()))
case("model: frozen", lambda: train(Regression().requires_grad_(False)))
case("model: no labels", lambda: train(NoLabels()))
case("model: tied", lambda: train(Tied()))
case("model: lazy", lambda: train(Lazy()))
case("model: complex", lambda: train(Complex()))
case("model: meta", lambda: train(Regression().to("meta")))
case("model: inference tensors", lambda: train(_inference()))
case("model: half", lambda: train(Regression().half()))
case("model: double", lambda: train(Regression().double()))
case("model: text", lambda: train("bert-base"))
case("model: a list", lambda: train([Regression()]))
case("model: empty", lambda: train(nn.Sequential()))
case("model: bare linear", lambda: train(nn.Linear(4, 1)))
case(
    "model: outputs change",
    lambda: train(Made(lambda y: {"loss": y.mean(), "logits": y[:1]}), evaluate=True, compute_metrics=lambda p: {}),
)
case("model_init: raises", lambda: train(model_init=_raises(ValueError("no weights"))))
case("model_init: returns text", lambda: train(model_init=lambda: "model"))
case("model_init: not callable", lambda: train(model_init=3))
case("loss function: raises", lambda: train(compute_loss_func=_raises(ValueError("bad loss"))))
case("loss function: returns None", lambda: train(compute_loss_func=lambda outputs, labels: None))
case("loss function: not callable", lambda: train(compute_loss_func="mse"))
case("loss function: one parameter", lambda: train(compute_loss_func=lambda outputs: outputs["loss"]))


# ---- metrics --------------------------------------------------------------------------------------------------------

METRICS: dict[str, Any] = {
    "raises": _raises(ZeroDivisionError("no samples")),
    "returns None": lambda p: None,
    "returns a list": lambda p: [0.5],
    "returns a number": lambda p: 0.5,
    "returns text": lambda p: "good",
    "integer names": lambda p: {1: 0.5},
    "None name": lambda p: {None: 0.5},
    "nested": lambda p: {"f1": {"micro": 0.5}},
    "numpy": lambda p: {"f1": np.float32(0.5)},
    "array": lambda p: {"f1": np.zeros(3)},
    "tensor": lambda p: {"f1": torch.tensor(0.5)},
    "tensors": lambda p: {"f1": torch.zeros(3)},
    "graph": lambda p: {"f1": torch.tensor(0.5, requires_grad=True)},
    "object": lambda p: {"f1": object()},
    "function": lambda p: {"f1": len},
    "None value": lambda p: {"f1": None},
    "NaN": lambda p: {"f1": float("nan")},
    "complex": lambda p: {"f1": 1j},
    "bytes": lambda p: {"f1": b"x"},
    "set": lambda p: {"f1": {1}},
    "huge": lambda p: {"f1": 10**400},
    "no parameter": {}.copy,
    "two parameters": lambda a, b: {},
    "many names": lambda p: {f"m{i}": i for i in range(100_000)},
    "generator": lambda p: (x for x in ()),
    "empty name": lambda p: {"": 0.5},
    "odd name": lambda p: {"a\nb\0": 0.5},
    "tuple name": lambda p: {("a", 1): 0.5},
    "changes predictions": lambda p: p.predictions.__setitem__(0, 9) or {},
}
for name, metric in METRICS.items():
    case(
        f"metric: {name}",
        lambda metric=metric: train(
            evaluate=True, compute_metrics=metric, options={"eval_strategy": "steps", "eval_steps": 2}
        ),
    )
case("metric: not callable", lambda: train(evaluate=True, compute_metrics="accuracy"))
case(
    "metric: best is text",
    lambda: train(
        evaluate=True,
        compute_metrics=lambda p: {"f1": "high"},
        options={"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "f1"},
    ),
)
case(
    "metric: logits raise",
    lambda: train(
        evaluate=True, compute_metrics=lambda p: {}, preprocess_logits_for_metrics=_raises(ValueError("no logits"))
    ),
)
case(
    "metric: logits None",
    lambda: train(
        evaluate=True, compute_metrics=lambda p: {"n": 1}, preprocess_logits_for_metrics=lambda logits, labels: None
    ),
)
case(
    "metric: logits text",
    lambda: train(
        evaluate=True, compute_metrics=lambda p: {"n": 1}, preprocess_logits_for_metrics=lambda logits, labels: "x"
    ),
)


# ---- callbacks ------------------------------------------------------------------------------------------------------


def callback(event: str, function: Callable[..., Any]) -> Any:
    """A callback of one event."""
    return type("Odd", (TrainerCallback,), {event: function})()


def _again(box: dict[str, Any]) -> Callable[..., Any]:
    return lambda self, args, state, control, **kwargs: box["trainer"].train() and None


def _with_trainer(event: str, function: Callable[[Any], Any]) -> None:
    box: dict[str, Any] = {}
    args = TrainingArguments("run", use_cpu=True, disable_tqdm=True, max_steps=3)

    def act(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        function(box["trainer"])

    box["trainer"] = Trainer(
        Regression(), args, train_dataset=DATA, eval_dataset=DATA, callbacks=[callback(event, act)]
    )
    box["trainer"].train()


def _in_thread(trainer: Any) -> None:
    found: list[BaseException] = []

    def run() -> None:
        try:
            trainer.train()
        except BaseException as error:  # it is raised again in the main thread
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise found[0]


NONE: dict[str, Any] = {
    "text": "early_stopping",
    "None": None,
    "int": 3,
    "function": lambda *args: None,
    "object": object(),
    "class of another kind": dict,
    "a model": Regression(),
    "a list": [TrainerCallback()],
    "class that needs arguments": type("Needs", (TrainerCallback,), {"__init__": lambda self, needed: None}),
    "class": TrainerCallback,
    "early stopping class": EarlyStoppingCallback,
}
for name, thing in NONE.items():
    case(f"callback: {name}", lambda thing=thing: train(callbacks=[thing]))
case("callbacks: not a list", lambda: train(callbacks=TrainerCallback()))
case("callbacks: a class", lambda: train(callbacks=TrainerCallback))
case("callbacks: text", lambda: train(callbacks="tensorboard"))
for event in (
    "on_init_end",
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_step_end",
    "on_log",
    "on_save",
    "on_epoch_end",
    "on_train_end",
):
    case(
        f"callback: {event} raises",
        lambda event=event: train(callbacks=[callback(event, _raises(ValueError("broken")))]),
    )
case("callback: wrong signature", lambda: train(callbacks=[callback("on_step_end", lambda self: None)]))
case("callback: too few parameters", lambda: train(callbacks=[callback("on_step_end", lambda self, args: None)]))
case(
    "callback: required parameter",
    lambda: train(callbacks=[callback("on_step_end", lambda self, a, s, c, mine, **k: None)]),
)
case("callback: not a method", lambda: train(callbacks=[callback("on_step_end", 3)]))
for name, answer in {"text": "stop", "int": 1, "True": True, "dict": {}, "object": object(), "list": []}.items():
    case(
        f"callback: returns {name}",
        lambda answer=answer: train(callbacks=[callback("on_step_end", lambda *a, **k: answer)]),
    )
case("callback: trains", lambda: _with_trainer("on_step_end", lambda trainer: trainer.train()))
case("callback: trains at the end", lambda: _with_trainer("on_train_end", lambda trainer: trainer.train()))
case("callback: trains in a thread", lambda: _with_trainer("on_step_end", _in_thread))
case("callback: evaluates", lambda: _with_trainer("on_step_end", lambda trainer: trainer.evaluate()))
case("callback: predicts", lambda: _with_trainer("on_step_end", lambda trainer: trainer.predict(DATA)))
case("callback: model None", lambda: _with_trainer("on_step_end", lambda trainer: setattr(trainer, "model", None)))
case("callback: deletes the model", lambda: _with_trainer("on_step_end", lambda trainer: delattr(trainer, "model")))
case(
    "callback: optimizer None",
    lambda: _with_trainer("on_step_end", lambda trainer: setattr(trainer, "optimizer", None)),
)
case(
    "callback: schedule None",
    lambda: _with_trainer("on_step_end", lambda trainer: setattr(trainer, "lr_scheduler", None)),
)
case(
    "callback: state is text",
    lambda: train(
        callbacks=[
            type("S", (TrainerCallback,), {"state_dict": lambda self: "x", "load_state_dict": lambda self, s: None})()
        ]
    ),
)
case("callback: logs an object", lambda: _with_trainer("on_step_end", lambda trainer: trainer.log({"x": object()})))
case("callback: logs text", lambda: _with_trainer("on_step_end", lambda trainer: trainer.log("x")))


# ---- optimizers and schedules ---------------------------------------------------------------------------------------


def _optimized(make: Callable[[Any], Any], schedule: Callable[[Any], Any] = lambda optimizer: None) -> None:
    model = Regression()
    optimizer = make(model)
    train(model, optimizers=(optimizer, schedule(optimizer)))


SGD = torch.optim.SGD
OPTIMIZERS: dict[str, Any] = {
    "of another model": lambda model: SGD(Regression().parameters(), lr=0.1),
    "of one parameter": lambda model: SGD([model.out.weight], lr=0.1),
    "with foreign parameters": lambda model: SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1),
    "lr tensor": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
    "text": lambda model: "adamw",
    "class": lambda model: SGD,
    "function": lambda model: len,
    "empty group": lambda model: SGD([{"params": list(model.parameters())}, {"params": []}], lr=0.1),
    "parameters": lambda model: list(model.parameters()),
    "lr zero": lambda model: SGD(model.parameters(), lr=0.0),
    "step raises": lambda model: type("Odd", (SGD,), {"step": _raises(ValueError("no step"))})(
        model.parameters(), lr=0.1
    ),
    "SparseAdam": lambda model: torch.optim.SparseAdam(list(model.parameters())),
    "step returns text": lambda model: type("Odd", (SGD,), {"step": lambda self, closure=None: "x"})(
        model.parameters(), lr=0.1
    ),
}
for name, make in OPTIMIZERS.items():
    case(f"optimizer: {name}", lambda make=make: _optimized(make))
case("optimizer: not a pair", lambda: train(optimizers=SGD(Regression().parameters(), lr=0.1)))
case("optimizer: class and text", lambda: train(optimizer_cls_and_kwargs=(SGD, "lr=0.1")))
case("optimizer: class and wrong options", lambda: train(optimizer_cls_and_kwargs=(SGD, {"speed": 1})))
case("optimizer: class that is none", lambda: train(optimizer_cls_and_kwargs=("sgd", {})))
case("optimizer: class alone", lambda: train(optimizer_cls_and_kwargs=SGD))

plain = lambda model: SGD(model.parameters(), lr=0.1)  # noqa: E731
SCHEDULES: dict[str, Any] = {
    "of another optimizer": lambda o: torch.optim.lr_scheduler.ConstantLR(SGD(Regression().parameters(), lr=0.1)),
    "text": lambda o: "linear",
    "class": lambda o: torch.optim.lr_scheduler.ConstantLR,
    "function": lambda o: lambda step: 0.1,
    "step raises": lambda o: type(
        "Odd", (), {"step": _raises(ValueError("no step")), "optimizer": o, "state_dict": lambda self: {}}
    )(),
    "lambda raises": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (2 - step)),
    "lambda NaN": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: float("nan")),
    "ends early": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=1),
}
for name, schedule in SCHEDULES.items():
    case(f"schedule: {name}", lambda schedule=schedule: _optimized(plain, schedule))
case(
    "schedule: without its optimizer",
    lambda: train(optimizers=(None, torch.optim.lr_scheduler.ConstantLR(SGD(Regression().parameters(), lr=0.1)))),
)
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler")

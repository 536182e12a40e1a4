"""Running a case with the library, and judging it by the loop by hand."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from loopwright import TrainerCallback, TrainingArguments

from .cases import Case
from .reference import EXACT, Gradients, Loop, difference, gradients_of

OPTIONS: dict[str, Any] = {
    "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "report_to": [], "optim": "sgd",
    "lr_scheduler_type": "constant", "learning_rate": 0.05, "max_grad_norm": 0.0, "logging_steps": 1,
    "train_sampling_strategy": "sequential",
}  # fmt: skip


class Split(NamedTuple):
    """How an update is cut: micro-batches, and samples in each."""

    accumulation: int
    size: int

    def __str__(self) -> str:
        return f"{self.accumulation}x{self.size}"


def doubles_stay(setattr_: Callable[..., None]) -> None:
    """Models of transformers compute norms, rotary positions and losses in single precision: here in double."""
    single, to, softmax = Tensor.float, Tensor.to, F.softmax

    def kept(self: Tensor, *given: Any, **named: Any) -> Tensor:
        if self.dtype is torch.float64 and (torch.float32 in given or named.get("dtype") is torch.float32):
            given = tuple(each for each in given if each is not torch.float32)
            named.pop("dtype", None)
            return to(self, *given, **named) if given or named else self
        return to(self, *given, **named)

    def sharp(values: Tensor, *given: Any, **named: Any) -> Tensor:
        if values.dtype is torch.float64:
            named.pop("dtype", None)
        return softmax(values, *given, **named)

    doubles = (torch.float64, torch.int64)
    setattr_(Tensor, "float", lambda self: self.double() if self.dtype in doubles else single(self))
    setattr_(Tensor, "to", kept)
    setattr_(F, "softmax", sharp)


def everything_pays(setitem: Callable[..., None]) -> None:
    """Also in a tiny run: proving costs nothing, and one micro-batch more costs nothing."""
    import loopwright.speed.planner.decision as plan

    setitem(plan.WORTH_SECONDS, "cpu", 0.0)
    setitem(plan.PER_MODULE, "cpu", 1e-9)


@dataclass
class Observed:
    """What came of a run."""

    trainer: Any
    gradients: list[Gradients] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """What was said to the user, other than that something is on."""
    layout: str = ""

    @property
    def weights(self) -> Gradients:
        return {name: p.detach().clone() for name, p in self.trainer.model.named_parameters()}

    def says(self, words: str) -> bool:
        return any(re.search(words, text, re.I) for text in self.told)


class _Watch(TrainerCallback):
    """Keeps the gradients of every update, and acts for the user."""

    def __init__(self, case: Case, gradients: list[Gradients]) -> None:
        self.case, self.gradients = case, gradients
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.case.begin is not None:
            self.case.begin(self.trainer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.case.act is not None:
            self.case.act(self.trainer, state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.gradients.append(gradients_of(model))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.case.after is not None:
            self.case.after(self.trainer, state.global_step - 1)


class _Ear(logging.Handler):
    def __init__(self, told: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.told = told

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.startswith("speed:\n"):  # the plan: what it says about itself is no report
            self.told.append(text)


def observe(
    case: Case,
    folder: Path,
    *,
    speed: str,
    split: Split,
    updates: int | None = None,
    resume: Any = None,
    **more: Any,
) -> Observed:
    """Train as a user would; the speed "tight" is "max" with few tokens in a micro-batch."""
    if speed == "tight":
        speed, more = "max", {"per_device_train_batch_tokens": 24, **more}
    arguments = {
        **OPTIONS, "speed": speed, "per_device_train_batch_size": split.size, "max_steps": updates or case.updates,
        "gradient_accumulation_steps": split.accumulation, "max_grad_norm": case.clip, "learning_rate": case.rate,
        **case.options, **more,
    }  # fmt: skip
    torch.manual_seed(0)
    gradients: list[Gradients] = []
    watch = _Watch(case, gradients)
    given = {**case.given()}
    rows, model = case.rows(), case.make()
    if case.optimizer is not None:
        given["optimizers"] = (case.optimizer(model), None)
    trainer = case.trainer(
        model=model,
        args=TrainingArguments(str(folder), **arguments),
        train_dataset=rows,
        data_collator=case.collator(),
        callbacks=[watch, *given.pop("callbacks", [])],
        **given,
    )
    watch.trainer = trainer
    found = Observed(trainer, gradients)
    ear = _Ear(found.told)
    logger = logging.getLogger("loopwright")
    logger.addHandler(ear)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        logger.removeHandler(ear)
    found.layout = str((trainer._loopwright.run.speed_plan or {}).get("layout", "collated"))
    found.told += [text for text in trainer._loopwright.notices.told if text not in found.told]
    return found


_BY_HAND: dict[Any, tuple[Case, Loop]] = {}
"""With the case itself, so that its id stays its own."""


def by_hand(case: Case, split: Split, *, written: bool = False) -> Loop:
    """The same by hand: the loss of each update by its definition, or micro-batch by micro-batch as written."""
    key = (id(case), split, written)
    if key not in _BY_HAND:
        _BY_HAND[key] = (case, loop_of(case, split, written=written).run(case.updates))
    return _BY_HAND[key][1]


def forget() -> None:
    """Leave out what was computed by hand."""
    _BY_HAND.clear()


def loop_of(case: Case, split: Split, *, written: bool = False) -> Loop:
    """A loop by hand that has not begun."""
    loss = case.written if written else case.loss
    assert loss is not None
    loop = Loop(
        case.make(), case.rows(), case.collator(), loss, size=split.size, accumulation=split.accumulation,
        clip=case.clip, act=case.act, after=case.after, learning_rate=case.rate, optimizer=case.optimizer,
    )  # fmt: skip
    if case.begin is not None:
        case.begin(loop)
    return loop


def judge(case: Case, found: Observed, split: Split, tolerance: float = EXACT) -> str | None:
    """What is wrong with a run; None if it is right, or said to be as written and is that."""
    if case.judge is not None:
        return case.judge(found, split)
    several = split.accumulation > 1
    wrong = None
    if case.loss is not None:
        wrong = difference(by_hand(case, split).gradients, found.gradients, tolerance)
        if wrong is None:
            return None
    if case.written is not None:
        wrong_so = difference(by_hand(case, split, written=True).gradients, found.gradients, tolerance)
        if wrong_so is None and (found.says(case.says) or not several):
            return None
        silent = " (as written, but nobody is told)" if wrong_so is None else ""
        wrong = (wrong or wrong_so or "not by its definition") + silent
    heard = "; ".join(found.told)[:300] or "nothing"
    return f"{wrong}; layout: {found.layout}; told: {heard}"


def check(case: Case, folder: Path, *, speed: str, split: Split, **more: Any) -> Observed:
    """Run a case and fail if it is wrong."""
    found = observe(case, folder, speed=speed, split=split, **more)
    wrong = judge(case, found, split)
    if wrong is not None and speed != "off" and split.accumulation > 1 and found.says(case.says):
        # Said to depend on how the update is cut: then it must be what it is without any acceleration.
        plain = observe(case, folder / "plain", speed="off", split=split, **more)
        wrong = difference(plain.gradients, found.gradients, EXACT) and wrong
    assert wrong is None, f"{case.name}, speed={speed}, {split}: {wrong}"
    if case.also is not None:
        case.also(found, split)
    return found

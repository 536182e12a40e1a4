"""OptimizerSpec: the arguments of an optimizer builder, with `optim_args` parsed and typed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....args.groups.optimizer import OptimizerArgs
from ....errors import ArgumentsError

Converter = Callable[[Any], Any]

WORDS: dict[str, Any] = {"true": True, "yes": True, "false": False, "no": False, "none": None, "null": None}


def parse_optim_args(text: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """`"k=v,k=v"` as a dict of typed values: booleans, None, numbers, `(a,b)` tuples, or unchanged text."""
    if not text:
        return {}
    if isinstance(text, Mapping):
        return {key: parse_value(value) if isinstance(value, str) else value for key, value in text.items()}
    options = {}
    for piece in filter(None, _split_outside_brackets(text)):
        key, equals, value = piece.partition("=")
        if not equals or not key.strip():
            raise ArgumentsError(f"optim_args must be 'name=value,name=value', but '{piece}' is not name=value.")
        options[key.strip()] = parse_value(value)
    return options


def parse_value(text: str) -> Any:
    """The typed value of a text."""
    text = text.strip()
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        return tuple(parse_value(part) for part in _split_outside_brackets(text[1:-1]) if part)
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _split_outside_brackets(text: str) -> list[str]:
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece.strip() for piece in pieces]


# ------------------------------------------------------------------------------------------------ converters


def to_bool(value: Any) -> bool:
    """A boolean, also from 0 and 1."""
    if value in (True, False):  # 0 and 1 are equal to these
        return bool(value)
    raise ValueError("true or false")


def to_int(value: Any) -> int:
    """An integer."""
    if isinstance(value, bool) or not isinstance(value, int | float) or int(value) != value:
        raise ValueError("an integer")
    return int(value)


def to_float(value: Any) -> float:
    """A number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number")
    return float(value)


def to_floats(value: Any) -> tuple[float, ...]:
    """Several numbers."""
    if not isinstance(value, tuple | list):
        raise ValueError("numbers in brackets, such as (0.9,0.95)")
    return tuple(to_float(part) for part in value)


def to_text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ValueError("a word")
    return value


def to_torch_dtype(value: Any) -> Any:
    """A dtype of torch, from its name."""
    import torch

    dtype = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError("the name of a torch dtype, such as bfloat16")
    return dtype


def optional(convert: Converter) -> Converter:
    """Like `convert`, but None is allowed."""
    return lambda value: None if value is None else convert(value)


# ------------------------------------------------------------------------------------------------ what builders get


def _say(text: str) -> None:
    logging.getLogger("loopwright").warning(text)


@dataclass(frozen=True)
class OptimizerSpec:
    """The arguments that concern an optimizer, as plain values."""

    name: str
    learning_rate: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    options: dict[str, Any] = field(default_factory=dict)
    target_modules: Any = None
    warmup_steps: float = 0
    total_updates: int | None = None
    decay_names: Collection[str] | None = None
    source: Any = None
    tell: Callable[[str], None] = _say

    @classmethod
    def of(cls, args: OptimizerArgs, **more: Any) -> OptimizerSpec:
        """From training arguments, or an object with their attributes; `more` are additional fields."""
        options = parse_optim_args(getattr(args, "optim_args", None))
        return cls(
            name=str(getattr(args.optim, "value", args.optim)),
            learning_rate=args.learning_rate,
            # Parameter groups have their own weight decay, so a value in optim_args would otherwise have no effect.
            weight_decay=options.get("weight_decay", args.weight_decay),
            betas=(args.adam_beta1, args.adam_beta2),
            epsilon=args.adam_epsilon,
            options=options,
            target_modules=getattr(args, "optim_target_modules", None),
            warmup_steps=getattr(args, "warmup_steps", None) or 0,
            source=args,
            **{key: value for key, value in more.items() if value is not None},
        )

    @property
    def adam(self) -> dict[str, Any]:
        """Learning rate, betas and epsilon under the names of Adam and similar optimizers."""
        return {"lr": self.learning_rate, "betas": self.betas, "eps": self.epsilon}

    def given(self, **converters: Converter) -> dict[str, Any]:
        """The user's options, converted; raises for options without a converter, listing the accepted ones."""
        problems, values = [], {}
        for key, value in self.options.items():
            if key not in converters:
                accepted = ", ".join(converters) or "no options"
                problems.append(f"optim='{self.name}' has no option '{key}' for optim_args. It accepts {accepted}.")
                continue
            try:
                values[key] = converters[key](value)
            except ValueError as wanted:
                problems.append(f"optim='{self.name}': {key} in optim_args must be {wanted}, got {value!r}.")
        if problems:
            raise ArgumentsError(problems)
        return values

    def warmup_updates(self) -> int:
        """The warm-up in updates, also if it was given as a fraction of the run."""
        if self.total_updates is not None and hasattr(self.source, "get_warmup_steps"):
            return int(self.source.get_warmup_steps(self.total_updates))
        if 0 < self.warmup_steps < 1:
            raise ArgumentsError(
                f"optim='{self.name}' has its own warmup and needs a number of steps, but "
                f"warmup_steps={self.warmup_steps} is a fraction and the length of the run is unknown. Pass "
                "total_updates, or set warmup_steps to an integer."
            )
        return int(self.warmup_steps)

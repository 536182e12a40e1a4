"""What the commands of the tool have in common: reading words, printing a result as text or JSON, exit codes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from ..args.field import advised
from ..args.secrets import masked_text
from ..errors import ArgumentsError, DataError, LoopwrightError
from .main import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED

CODES = {
    DONE: "success",
    FAILED: "the run failed",
    BAD_INPUT: "wrong input: configuration, arguments, data, model or checkpoint",
    STOPPED: "stopped after saving; the same command resumes",
    INTERRUPTED: "interrupted, nothing was saved",
}


@dataclass
class Result:
    """What a command prints: `data` with --json, else `text`."""

    data: dict[str, Any]
    text: str = ""
    code: int = DONE


@dataclass
class Words:
    """The words of a command line."""

    command: str
    positional: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    """Words for the configuration."""
    options: dict[str, str | bool] = field(default_factory=dict)
    is_input: bool = True
    """Whether an error is one of the input; a command sets it to False when its work has begun."""

    def first(self, what: str) -> str:
        """The first positional word; raises if there is none."""
        if not self.positional:
            raise ArgumentsError(f"loopwright {self.command} needs {what}; see `loopwright {self.command} --help`")
        return self.positional[0]


@dataclass(frozen=True)
class Usage:
    """How a command is called."""

    command: str
    arguments: str
    text: str
    options: Mapping[str, str] = field(default_factory=dict)
    """Options and their meanings; one that ends in `=` takes a value."""
    takes_overrides: bool = False
    most: int = 1
    """Positional words at most."""

    def help(self) -> str:
        keys = " [key=value | --key value ...]" if self.takes_overrides else ""
        rows = {**{name.replace("=", " VALUE"): text for name, text in self.options.items()}, "--json": _JSON}
        width = max(map(len, rows))
        lines = [f"usage: loopwright {self.command} {self.arguments}{keys}", "", self.text, "", "options:"]
        lines += [f"  {name:<{width}}  {text}" for name, text in rows.items()]
        if self.takes_overrides:
            lines += ["", "keys: those of the configuration, such as --learning_rate 1e-4 or data.max_length=128;"]
            lines += ["`loopwright args WORD` searches the training arguments, `loopwright schema` has all keys"]
        return "\n".join([*lines, "", f"exit codes: {', '.join(f'{code} {text}' for code, text in CODES.items())}"])


_JSON = "print one JSON object to standard output, and everything else to standard error"


def run_command(usage: Usage, words: Sequence[str], work: Callable[[Words], Result]) -> int:
    """Read the words, do the work and print its result; returns the exit code."""
    if any(word in ("-h", "--help") for word in words):
        print(usage.help())
        return DONE
    as_json = "--json" in words
    found = Words(usage.command)
    try:
        if as_json:
            with redirect_stdout(sys.stderr):
                result = _worked(usage, words, found, work)
        else:
            result = _worked(usage, words, found, work)
    except LoopwrightError as error:
        is_input = found.is_input or isinstance(error, (ArgumentsError, DataError))  # these may be found late
        return report_error(error, as_json, BAD_INPUT if is_input else FAILED)
    if as_json:
        print(json.dumps(_masked({**result.data, "code": result.code}), default=str))
    elif result.text:
        print(masked_text(result.text))
    return result.code


def _masked(value: Any) -> Any:
    """JSON values without the credentials and tokens in their texts; NaN, which JSON does not have, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        return masked_text(value)
    if isinstance(value, dict):
        return {key: _masked(each) for key, each in value.items()}
    return [_masked(each) for each in value] if isinstance(value, (list, tuple)) else value


def _worked(usage: Usage, words: Sequence[str], found: Words, work: Callable[[Words], Result]) -> Result:
    _read(usage, [word for word in words if word != "--json"], found)
    return work(found)


def report_error(error: LoopwrightError, as_json: bool, code: int) -> int:
    """Print an error as one line, and as JSON if that was requested; returns its exit code."""
    text = masked_text(str(error))
    print(f"loopwright: {text}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": text, "kind": type(error).__name__, "code": code}))
    return code


def _read(usage: Usage, words: list[str], found: Words) -> None:
    known = {name.rstrip("="): name.endswith("=") for name in usage.options}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in known:
            if known[name] and not equals and not rest:
                raise ArgumentsError(f"{name} needs a value; see `loopwright {usage.command} --help`")
            found.options[name] = (value if equals else rest.pop(0)) if known[name] else True
        elif usage.takes_overrides and len(found.positional) == usage.most:
            found.overrides = [word, *rest]  # options of the command come before the keys, or among them
            _take_options(found, known)
            return
        elif word.startswith("-") and word != "-":
            problem = f"loopwright {usage.command} has no option {name!r}"
            more = f"see `loopwright {usage.command} --help`"
            raise ArgumentsError(advised(problem, name, [*known, "--json"], more))
        elif len(found.positional) == usage.most:
            raise ArgumentsError(f"unexpected argument {word!r}; see `loopwright {usage.command} --help`")
        else:
            found.positional.append(word)


def _take_options(found: Words, known: Mapping[str, bool]) -> None:
    """Move options of the command out of the overrides."""
    kept: list[str] = []
    rest = found.overrides
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in known and (not known[name] or equals or rest):
            found.options[name] = (value if equals else rest.pop(0)) if known[name] else True
        else:
            kept.append(word)
    found.overrides = kept

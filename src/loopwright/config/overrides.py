"""Values given on the command line: `key=value`, `--key value`, `--key=value` and, for a boolean, `--key`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_origin

import yaml

from ..args.field import Spec
from ..args.names import Name
from ..args.reading import read_bool, read_str, reader_for
from ..errors import ArgumentsError


class Override(NamedTuple):
    """A value given on the command line."""

    key: str
    """With dots for a key inside a block."""
    text: str | None
    """None for a flag without a value."""
    shown: str
    """As it was typed, for messages and sources."""

    def value(self, spec: Spec | None) -> Any:
        """The value for a field: text for one that is text, else read as YAML."""
        if self.text is None:
            if spec is not None and reader_for(spec.hint) is not read_bool and spec.default is not None:
                raise ArgumentsError(f"command line: {self.shown} needs a value: {self.shown}=VALUE")
            return True
        if spec is not None and (_is_text(spec) or (_may_be_text(spec) and not self.text.lstrip().startswith("{"))):
            return None if self.text in ("null", "~") and spec.default is None else self.text
        try:
            return yaml.safe_load(self.text)
        except yaml.YAMLError:
            raise ArgumentsError(f"command line: {self.key}={self.text!r} is not YAML; put texts in quotes") from None


def read_overrides(words: Sequence[str], spec_of: Callable[[str], Spec | None]) -> list[Override]:
    """The overrides in a command line; `spec_of` returns the field of a key, or None."""
    found: list[Override] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.lstrip("-").partition("=")
        is_flag = word.startswith("--")
        if not name or (not is_flag and (not equals or word.startswith("-"))):
            raise ArgumentsError(f"{word!r} is neither key=value nor --key value; write it as key=value")
        key = _key(name, spec_of)
        if equals:
            found.append(Override(key, text, f"{'--' if is_flag else ''}{name}"))
        elif _takes_next(rest, spec_of(key)):
            found.append(Override(key, rest.pop(0), f"--{name}"))
        else:
            found.append(Override(key, None, f"--{name}"))
    return found


def _key(name: str, spec_of: Callable[[str], Spec | None]) -> str:
    """The key of a name; dashes may be written for underscores."""
    return name if spec_of(name) is not None else name.replace("-", "_")


def _takes_next(rest: list[str], spec: Spec | None) -> bool:
    """Whether the next word is the value of a flag."""
    if not rest or rest[0].startswith("--"):
        return False
    if spec is None or reader_for(spec.hint) is not read_bool:
        return True
    try:
        read_bool(rest[0])
    except ValueError:
        return False
    return True


def _may_be_text(spec: Spec) -> bool:
    """Whether a field is a path or name, or a mapping of them: YAML would change some characters of a path."""
    return str in get_args(spec.hint) and any(get_origin(member) is Mapping for member in get_args(spec.hint))


def _is_text(spec: Spec) -> bool:
    reader = reader_for(spec.hint)
    return reader is read_str or (isinstance(reader, type) and issubclass(reader, Name))

"""The request of `loopwright launch`: its own options, torchrun's options, and the script with its arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from ..errors import ArgumentsError


@dataclass(frozen=True)
class LaunchRequest:
    """A launch as the user specified it."""

    own: argparse.Namespace
    passed: tuple[str, ...]
    """Options of torchrun, as given by the user."""
    values: argparse.Namespace
    """The same options parsed by torchrun, with its defaults and PET_* variables."""
    given: frozenset[str] = field(default_factory=frozenset)
    """Names of torchrun's options set by the user or the environment."""
    script: tuple[str, ...] = ()
    """The script (or module) and its arguments."""

    @property
    def nodes(self) -> tuple[int, int]:
        """The minimum and maximum number of nodes."""
        low, _, high = str(self.values.nnodes).partition(":")
        try:
            nodes = int(low), int(high or low)
        except ValueError:
            nodes = (0, 0)
        if not 1 <= nodes[0] <= nodes[1]:
            raise ArgumentsError(f"--nnodes {self.values.nnodes}: use a number of nodes, or MIN:MAX such as 1:4")
        return nodes

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change while the job runs."""
        return self.nodes[0] < self.nodes[1]

    @property
    def is_static(self) -> bool:
        """Whether ranks are fixed by --node-rank and --master-addr instead of by the rendezvous."""
        named = {"node_rank", "master_addr"} & self.given
        return bool(named) and "rdzv_endpoint" not in self.given and not self.own.host

    @property
    def name(self) -> str:
        """The name of the job; defaults to the script's name."""
        return str(self.own.name or Path(self.script[0]).stem)

    @property
    def passed_on(self) -> list[str]:
        """The options of torchrun without the number of nodes, which a cluster sets itself."""
        kept, rest = [], list(self.passed)
        while rest:
            word = rest.pop(0)
            if word.partition("=")[0] != "--nnodes":
                kept.append(word)
            elif "=" not in word:
                rest.pop(0)
        return kept


def read(
    words: Sequence[str],
    own: argparse.ArgumentParser,
    torchrun: argparse.ArgumentParser,
    environment: Mapping[str, str],
) -> LaunchRequest:
    """Parse a command line: loopwright's options, torchrun's options, then the script with its own arguments."""
    mine, for_torchrun, script = split(words, own, torchrun)
    options = own.parse_args(mine)
    if not script:
        raise ArgumentsError("no script was given: loopwright launch [options] train.py [the script's own options]")
    values = torchrun.parse_args([*for_torchrun, *script])
    named = {action.dest for word in for_torchrun if (action := _action(word, torchrun)) is not None}
    preset = {name.removeprefix("PET_").lower() for name in environment if name.startswith("PET_")}
    return LaunchRequest(options, tuple(for_torchrun), values, frozenset(named | preset), tuple(script))


def split(
    words: Sequence[str], own: argparse.ArgumentParser, torchrun: argparse.ArgumentParser
) -> tuple[list[str], list[str], list[str]]:
    """The arguments of loopwright, of torchrun and of the script."""
    rest = list(words)
    mine: list[str] = []
    for_torchrun: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "--":
        mine_too = _action(rest[0], own)
        action = mine_too or _action(rest[0], torchrun)
        if action is None:
            raise ArgumentsError(_unknown(rest[0], own, torchrun))
        count = 1 if "=" in rest[0] or action.nargs == 0 else 2
        (mine if mine_too else for_torchrun).extend(rest[:count])
        del rest[:count]
    return mine, for_torchrun, rest[1:] if rest[:1] == ["--"] else rest


def _action(word: str, parser: argparse.ArgumentParser) -> argparse.Action | None:
    return parser._option_string_actions.get(word.partition("=")[0])


def _unknown(word: str, *parsers: argparse.ArgumentParser) -> str:
    name = word.partition("=")[0]
    known = [option for parser in parsers for option in parser._option_string_actions]
    close = get_close_matches(name, known, n=1)
    advice = f"did you mean {close[0]}?" if close else "see loopwright launch --help and torchrun --help."
    return (
        f"{name} is not an option of loopwright launch or torchrun: {advice} Options of the script come after the "
        "script"
    )

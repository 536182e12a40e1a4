"""`loopwright args`: the reference of TrainingArguments, generated from the fields, or those that match some words."""

from __future__ import annotations

import argparse
import sys
from difflib import get_close_matches
from typing import Any

from ..json_output import add_json, show


def run(words: list[str]) -> int:
    """Print the arguments with their defaults and meanings: all as Markdown, or those found by words."""
    description = "List every training argument with its default and meaning, as Markdown, or search them."
    parser = argparse.ArgumentParser("loopwright args", description=description)
    parser.add_argument("words", nargs="*", metavar="WORD", help="show arguments with all these words in name or help")
    add_json(parser)
    options = parser.parse_args(words)
    wanted = options.words
    from ...args.reference import markdown_reference
    from ...pt.arguments import Seq2SeqTrainingArguments, TrainingArguments

    if not wanted:
        show(options, _described(TrainingArguments, wanted), markdown_reference(TrainingArguments))
        return 0
    return _search(Seq2SeqTrainingArguments, options)


def _described(cls: type, words: list[str]) -> dict[str, Any]:
    """Default and meaning of the arguments that match the words, by name."""
    from ...args.field import specs
    from ...args.reference import matches

    found = [spec for spec in specs(cls).values() if spec.row is None and matches(spec, words)]
    return {spec.name: {"default": spec.default, "help": spec.help} for spec in found}


def _search(cls: type, options: argparse.Namespace) -> int:
    from ...args.field import specs
    from ...args.reference import found_text, matches

    words = options.words
    found = [spec for spec in specs(cls).values() if matches(spec, words)]
    if found:
        show(options, _described(cls, words), "\n\n".join(map(found_text, found)))
        return 0
    close = get_close_matches(words[0].replace("-", "_"), specs(cls), n=3, cutoff=0.5)
    advice = f"did you mean {', '.join(close)}?" if close else "`loopwright args` lists all"
    missing = " and ".join(map(repr, words))
    print(f"loopwright args: no argument has {missing} in its name or help; {advice}", file=sys.stderr)
    return 1

"""`loopwright args`: the reference of TrainingArguments, generated from the fields."""

from __future__ import annotations

import argparse


def run(words: list[str]) -> int:
    """Print every argument with its default and meaning, as Markdown."""
    description = "List every training argument with its default and meaning, as Markdown."
    argparse.ArgumentParser("loopwright args", description=description).parse_args(words)
    from ..args.reference import markdown_reference
    from ..pt.arguments import TrainingArguments

    print(markdown_reference(TrainingArguments))
    return 0

"""`loopwright convert`: a checkpoint of loopwright or Lightning in the format of transformers."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..json_output import add_json, show

DESCRIPTION = """Write a checkpoint in the format of transformers' Trainer to a new folder.

CHECKPOINT is a folder of loopwright (checkpoint-500) or a .ckpt file of Lightning. loopwright resumes from the result
and from checkpoints of transformers without a conversion, so --to native is refused."""


def run(words: list[str]) -> int:
    """Convert a checkpoint; prints where it is and what it does not contain."""
    parser = argparse.ArgumentParser(
        "loopwright convert", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path, help="a folder that does not exist yet; end it in checkpoint-N")
    parser.add_argument("--to", required=True, choices=("transformers", "native"))
    parser.add_argument("--prefix", default="", help="what the names of a Lightning module begin with, as in 'model.'")
    add_json(parser)
    options = parser.parse_args(words)
    from ...errors import ArgumentsError
    from ...pt.checkpoint.exchange import to_transformers

    if options.to == "native":
        raise ArgumentsError(
            "--to native: nothing to convert. loopwright resumes from checkpoints of transformers: pass the folder as "
            "resume_from_checkpoint, and the next save is native"
        )
    missing = to_transformers(options.checkpoint, options.out, prefix=options.prefix)
    text = f"wrote {options.out}" + (f", without: {', '.join(missing)}" if missing else "")
    show(options, {"folder": str(options.out), "without": list(missing)}, text)
    return 0

"""A run in a process of its own: `python -m tests.hub.child FOLDER STRATEGY STEPS`."""

from __future__ import annotations

import sys

from .runs import trainer_of


def main(folder: str, strategy: str, steps: str) -> None:
    trainer_of(folder, hub_strategy=strategy, max_steps=int(steps), hub_always_push=True).train()


if __name__ == "__main__":
    main(*sys.argv[1:])

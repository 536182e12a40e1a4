"""The time of a usual update, from the updates of a trial: what is slow once is counted once.

A device loads kernels when a kind of batch first occurs, such as one with padding. Such an update may take as long as
fifty others, and it does so only once in a run.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

WARM = 4
"""Updates that are never timed: the first ones are slower."""
OUTLIER = 4.0
"""Multiple of the usual time of an update above which it is not a usual one, such as one that compiles."""
RECURRING = 3
"""Slow blocks of the later half from which slow updates are a part of training, and not a cost that occurs once."""
DRIFT = 1.15
"""Ratio of the times of the first and the second half of the updates from which the device was still warming up."""


@dataclass(frozen=True)
class UpdateTimes:
    """Seconds of updates."""

    usual: float
    """Of a usual update, with its wait for data."""
    slower: float
    """By which the others were slower, in total."""
    timed: int
    """Updates from which the usual time was taken."""


@dataclass(frozen=True)
class Block:
    """Updates between two moments at which the device had computed everything."""

    count: int
    seconds: float

    @property
    def mean(self) -> float:
        return self.seconds / self.count

    def is_slow(self, usual: float) -> bool:
        """Whether one of its updates was slow, if the others were usual."""
        return self.seconds > usual * (self.count - 1 + OUTLIER)


def times_of(seconds: Sequence[float], stops: Sequence[int], heavy: Collection[int] = ()) -> UpdateTimes:
    """The usual time of an update, and by how much other updates were slower.

    `stops` are the numbers of updates after which the device had computed everything. Updates in `heavy` had other
    samples than in the run.
    """
    if len(seconds) <= WARM:
        first = min(1, len(seconds) - 1)
        usual = statistics.mean(seconds[first:])
        return UpdateTimes(usual, _slower(seconds[:first], usual, heavy), len(seconds) - first)
    blocks = _blocks(seconds, stops)
    kept = usual_blocks(blocks)
    timed, usual = sum(each.count for each in kept), _mean(kept)
    others = sum(each.seconds for each in blocks) - sum(each.seconds for each in kept)
    count = sum(each.count for each in blocks) - timed
    return UpdateTimes(usual, _slower(seconds[:WARM], usual, heavy) + max(0.0, others - usual * count), timed)


def usual_blocks(blocks: Sequence[Block]) -> list[Block]:
    """The blocks that show how long later updates take."""
    usual, half = statistics.median(each.mean for each in blocks), len(blocks) // 2
    early, late = ([each for each in part if not each.is_slow(usual)] for part in (blocks[:half], blocks[half:]))
    if len(blocks) - half - len(late) >= RECURRING:
        early, late = list(blocks[:half]), list(blocks[half:])
    is_warming_up = len(early) > 1 and _mean(early) > DRIFT * _mean(late)
    return late if is_warming_up else early + late


def _blocks(seconds: Sequence[float], stops: Sequence[int]) -> list[Block]:
    ends = [WARM, *(each for each in stops if each > WARM)]
    return [Block(end - begin, sum(seconds[begin:end])) for begin, end in pairwise(ends)]


def _mean(blocks: Sequence[Block]) -> float:
    return sum(each.seconds for each in blocks) / sum(each.count for each in blocks)


def _slower(seconds: Sequence[float], usual: float, heavy: Collection[int]) -> float:
    return sum(max(0.0, each - usual) for number, each in enumerate(seconds) if number not in heavy)

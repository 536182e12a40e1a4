"""TPU types: memory of a chip, number of chips of a topology, and packages needed for compilation."""

from __future__ import annotations

import math
import re
from importlib.util import find_spec
from typing import NamedTuple

from ..errors import ArgumentsError, MissingPackage

INSTALL = 'torchax==0.0.13 "jax[tpu]==0.10.2"'
"""Compatible versions; jax installs the matching libtpu."""
PACKAGES = ("torchax", "jax", "libtpu")


class Chip(NamedTuple):
    """A TPU type: memory of one chip, and the number of dimensions of its topologies."""

    gib: int
    dimensions: int


CHIPS = {"v5e": Chip(16, 2), "v6e": Chip(32, 2), "v5p": Chip(95, 3)}
EXAMPLES = {"v5e": "v5e:2x2", "v6e": "v6e:4x4", "v5p": "v5p:2x2x1"}


class Topology(NamedTuple):
    """A grid of connected chips."""

    name: str
    kind: str
    sizes: tuple[int, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.sizes)

    @property
    def host_bounds(self) -> list[int]:
        """The chips of one host in three dimensions: two by two, or all of a smaller topology."""
        return [min(2, self.sizes[0]), min(2, self.sizes[1]), 1]


def read_topology(name: str) -> Topology:
    """The topology of a name such as v5e:2x2."""
    kind, _, grid = name.partition(":")
    chip = CHIPS.get(kind)
    known = ", ".join(EXAMPLES.values())
    if chip is None:
        raise ArgumentsError(f"--topology {name}: {kind!r} is not a known TPU type; use the form {known}")
    sizes = [int(size) for size in grid.split("x")] if re.fullmatch(r"\d+(x\d+)*", grid) else []
    if len(sizes) != chip.dimensions or 0 in sizes:
        raise ArgumentsError(
            f"--topology {name}: {kind} has {chip.dimensions} dimensions of chips joined by x, such as {EXAMPLES[kind]}"
        )
    return Topology(name, kind, tuple(sizes))


def check_packages() -> None:
    """Raise unless the packages of the dry run are installed; none of them is imported."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingPackage(", ".join(missing), needed_for="loopwright dryrun", install=INSTALL)

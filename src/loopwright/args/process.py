"""Rank and world size, read from the launcher's environment variables; no process group is needed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from ..errors import ArgumentsError, NotAvailable
from .names import ParallelMode


class ProcessInfo:
    """Rank, world size and what this rank is responsible for."""

    log_on_each_node: bool
    save_on_each_node: bool
    ddp_timeout: int

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return _from_environment("WORLD_SIZE", 1)

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return _from_environment("RANK", 0)

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its node."""
        return _from_environment("LOCAL_RANK", 0)

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether a launcher started several processes."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """Timeout of collective operations."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def should_log(self) -> bool:
        """Whether this rank logs."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Whether this rank writes checkpoints."""
        return (self.local_process_index if self.save_on_each_node else self.process_index) == 0

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the body on the main process before the others; a no-op with one process."""
        if self.world_size > 1:
            raise NotAvailable(
                f"main_process_first({desc!r}) with {self.world_size} processes: not available yet; run that code in "
                "every process, or before the launch"
            )
        yield


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ArgumentsError(
            f"the environment variable {name}={text!r} is not a number; it is set by a launcher such as torchrun"
        ) from None

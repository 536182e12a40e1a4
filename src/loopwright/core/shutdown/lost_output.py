"""Output without a reader: a closed terminal, or a pipe whose reader has ended (`| tee` after Ctrl-C).

Every write to it is an error, which would end a run that is about to save. It is discarded instead.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STANDARD = (1, 2)
"""The descriptors of stdout and stderr."""


@contextmanager
def lost_output_discarded() -> Iterator[None]:
    """A context that ends early, without an error, if what it prints has no reader any more."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise
        discard_lost_output()


def discard_lost_output() -> None:
    """Redirect stdout and stderr to the null device, if they have no reader any more."""
    for descriptor in STANDARD:
        with suppress(OSError):  # it is closed
            if _has_no_reader(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def _has_no_reader(descriptor: int) -> bool:
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))

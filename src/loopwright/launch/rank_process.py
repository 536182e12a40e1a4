"""The process of a rank: the kernel sends it SIGTERM when its launcher dies (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from subprocess import Popen
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

PR_SET_PDEATHSIG = 1


class RankProcess(SubprocessHandler):
    """torchrun's process of a rank, in a session of its own, tied to the life of the launcher."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Popen[Any]:
        if not sys.platform.startswith("linux"):
            return super()._popen(args, env)
        return Popen(
            args, env=env, stdout=self._stdout, stderr=self._stderr, start_new_session=True, preexec_fn=tied_to_parent()
        )


def tied_to_parent() -> Callable[[], None]:
    """A function for a new process, to be called before it runs its program.

    The signal comes when the *thread* that started the process ends, so ranks are started in the main thread.
    """
    prctl, launcher = ctypes.CDLL(None).prctl, os.getpid()

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != launcher:  # it died before the signal was set
            os._exit(1)

    return tie

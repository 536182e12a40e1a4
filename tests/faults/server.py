"""A process that has imported everything and forks itself once per case, so that a case costs no import.

Its argument is the module whose functions are called; `warm_up` of that module comes first. Reads one JSON job per
line, {"call", "options", "out", "timeout", "kill_after", "kill_with"}, and answers {"status", "seconds"}. The status is
that of `subprocess`: an exit code, or minus the number of the signal that ended the child.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any


def runs() -> Any:
    """The module the cases are in."""
    return importlib.import_module(sys.argv[1])


def child(job: dict[str, Any]) -> None:
    """Run the job's function in this process and end it, as an interpreter would."""
    out = os.open(job["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    code: Any = 0
    try:
        getattr(runs(), job["call"])(**job["options"])
    except SystemExit as leaving:
        code = leaving.code or 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def wait(pid: int, timeout: float, kill_after: float | None, kill_with: int) -> int:
    """The status of the child; it gets a signal when asked for, and is killed when it takes too long."""
    started = time.monotonic()
    end = started + timeout
    due = None if kill_after is None else started + kill_after
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if due is not None and now >= due:
            os.kill(pid, kill_with)
            due = None
        if now > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 124
        time.sleep(0.001)


def main() -> None:
    import gc

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    runs().warm_up()
    gc.freeze()  # so that a collection in a child does not copy every page
    print(json.dumps({"ready": True}), file=answers, flush=True)
    while line := sys.stdin.readline():
        job = json.loads(line)
        started = time.monotonic()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                child(job)
            except KeyboardInterrupt:  # before the job has begun, or when it is over
                os._exit(130)
        status = wait(pid, job["timeout"], job["kill_after"], job["kill_with"])
        try:
            os.killpg(pid, signal.SIGKILL)  # its workers, if it could not end them
        except ProcessLookupError:
            pass
        print(json.dumps({"status": status, "seconds": time.monotonic() - started}), file=answers, flush=True)
    os._exit(0)  # nothing to tidy up, and doing so takes seconds


if __name__ == "__main__":
    main()

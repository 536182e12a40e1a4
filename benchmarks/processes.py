"""One process per arm: started, bounded in time, ended with everything it started, its lines of JSON collected."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

POLL_SECONDS = 0.02

PR_SET_PDEATHSIG = 1

Result = dict[str, Any]


def environment(folder: str, cache: Path | None = None) -> dict[str, str]:
    """Ours from the sources beside this file, nobody asks the network; without a cache nothing was compiled before."""
    paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    compiled = folder if cache is None else str(cache.resolve())
    caches = {
        "TMPDIR": folder,
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(compiled, "inductor"),
        "TRITON_CACHE_DIR": os.path.join(compiled, "triton"),
        "XDG_CACHE_HOME": os.path.join(compiled, "user"),
    }
    python = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **quiet, **caches, **python}


def die_with_parent() -> None:
    """In a new process on Linux: be killed when the benchmark ends, so that no arm keeps using cores or a GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_arm(
    script: str | Path, arm: str, words: Iterable[str], timeout: float, cache: Path | None = None
) -> Result:
    """Run one arm in a process of its own and return the lines it wrote, merged."""
    started = StartedArm(arm, words, timeout, cache, script=script)
    while not started.is_over():
        time.sleep(POLL_SECONDS)
    return started.result()


class StartedArm:
    """An arm in a process of its own: a new interpreter, or a fork of this one that has imported the libraries.

    A fork saves the imports of every arm; this process must not have touched the device then.
    """

    def __init__(
        self, arm: str, words: Iterable[str], timeout: float, cache: Path | None = None, *,
        script: str | Path = "", main: Callable[[list[str]], None] | None = None, more: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        folder, self._timeout, self._code = self._folder.name, timeout, 0
        self._into, self._log = Path(folder, "lines.jsonl"), Path(folder, "log")
        given = [*words, "--arm", arm, "--into", str(self._into)]
        variables = {**environment(folder, cache), **(more or {})}
        self._started = time.perf_counter()
        with open(self._log, "w") as out:
            if main is not None:
                self.process: Any = Fork(lambda: main(given), out.fileno(), variables, folder)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, str(script), *given], stdout=out, stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL, env=variables, cwd=folder, start_new_session=True,
                    preexec_fn=die_with_parent,
                )  # fmt: skip

    def is_over(self) -> bool:
        """Whether the process has ended or has taken too long."""
        self._code = self.process.poll()
        return self._code is not None or time.perf_counter() - self._started > self._timeout

    def result(self) -> Result:
        """End the process, and return the lines it wrote, merged."""
        end(self.process)
        result = merged(self._into)
        result["process_s"] = time.perf_counter() - self._started
        if self._code is None:
            result |= {"status": "timed out", "note": f"not done after {self._timeout:.0f} s"}
        elif "status" not in result:
            text = self._log.read_text(errors="replace")[-3000:]
            result |= {"status": "failed", "note": f"exit code {self._code}", "log": text}
        self._folder.cleanup()
        return result


class Fork:
    """A copy of this process that calls a function; it has the methods of Popen that are used here."""

    def __init__(self, run: Callable[[], None], output: int, variables: dict[str, str], folder: str) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._be_child(run, output, variables, folder)

    @staticmethod
    def _be_child(run: Callable[[], None], output: int, variables: dict[str, str], folder: str) -> None:
        code = 1
        try:
            os.setsid()
            die_with_parent()
            os.chdir(folder)
            os.environ.update(variables)
            tempfile.tempdir = folder
            os.dup2(output, 1)
            os.dup2(output, 2)
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(POLL_SECONDS)


def end(process: Any) -> None:
    """End the arm and the loader workers it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Worker:
    """An arm that stays: it answers one request after the other, so that arms can take turns on a noisy machine."""

    def __init__(self, script: str | Path, arm: str, words: Iterable[str]) -> None:
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.log = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(
            [sys.executable, str(script), *words, "--arm", arm], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log, env=environment(self.folder.name), start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip

    def ask(self, request: Any, timeout: float) -> Result:
        """The answer to a request, or why there is none."""
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._gone()
        answer, until = b"", time.perf_counter() + timeout
        while not answer.endswith(b"\n"):
            if not select.select([self.process.stdout], [], [], max(until - time.perf_counter(), 0))[0]:
                self.close()
                return {"status": "timed out", "note": f"no answer after {timeout:.0f} s"}
            read = os.read(self.process.stdout.fileno(), 1 << 16)
            if not read:
                return self._gone()
            answer += read
        return json.loads(answer)

    def _gone(self) -> Result:
        self.close()
        self.log.seek(0)
        return {"status": "failed", "note": f"exit code {self.process.returncode}", "log": self.log.read()[-3000:]}

    def close(self) -> None:
        end(self.process)
        self.folder.cleanup()


def serve(answer: Callable[[Any], Result]) -> None:
    """The other end of a Worker: answer each line that comes in; what libraries print goes to the log."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            result = answer(json.loads(line))
        except Exception as error:
            result = failure(error)
        replies.write(json.dumps(plain(result), default=str) + "\n")
        replies.flush()


def merged(file: Path) -> Result:
    """The JSON lines of a file as one result; a line cut off by the end of its process does not count."""
    result: Result = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        with suppress(json.JSONDecodeError):
            result |= json.loads(line)
    return result


def write_line(file: Path, values: Result) -> None:
    with open(file, "a") as out:
        out.write(json.dumps(plain(values), default=str) + "\n")


def plain(value: Any) -> Any:
    """The value as JSON holds it; numbers that are not finite become their names."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def child(options: argparse.Namespace, work: Callable[[], Result]) -> None:
    """Do the arm's work and write what came of it, whatever that is."""
    write_line(options.into, {"described": described_here()})
    try:
        result = work()
    except Exception as error:
        result = failure(error)
    write_line(options.into, result)


def described_here() -> Result:
    """Date, machine and versions, with those of the packages only these benchmarks meet."""
    from machine import _version, described

    import loopwright

    found = described()
    more = {name: _version(name) for name in ("pytorch-lightning", "liger-kernel", "triton")}
    found["versions"] |= more | {"loopwright": loopwright.__version__}
    return found


def failure(error: Exception) -> Result:
    """What an arm that raised reports."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    missing = isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("loopwright")
    if missing or type(error).__name__ == "NotInstalled":
        return {"status": "not installed", "note": text}
    if type(error).__name__ == "OutOfMemoryError" or "out of memory" in text.lower():
        return {"status": "out of memory", "note": text}
    return {"status": "failed", "note": text, "log": traceback.format_exc()[-3000:]}

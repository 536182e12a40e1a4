"""The processes of the pool: one imports everything and is forked, the others run cases in groups of their own.

The first one reads a line of JSON per wish: {"fork": port, "out": file} is answered with the id of a new process, and
{"status": id} with how it ended, as `subprocess` says it, or null while it runs.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import Client
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]
WARM = (
    "loopwright.pt.trainer", "loopwright.callbacks.defaults", "loopwright.pt.strategies.choose", "safetensors.torch",
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.nn.parallel",
    "transformers.models.llama.modeling_llama", "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.qwen3.modeling_qwen3", "tests.adversary.zoo", "tests.adversary.running",
)  # fmt: skip


def main() -> None:
    """Import what cases need, without anything that starts a thread: those would be lost in a fork."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    from distributed import cases

    for name in WARM:
        try:
            importlib.import_module(name)
        except ImportError:
            pass  # the tests that need it say so
    gc.freeze()  # so that a collection in a child does not copy every page
    print(json.dumps("ready"), file=answers, flush=True)
    children: dict[int, int | None] = {}
    while line := sys.stdin.readline():
        wish = json.loads(line)
        if "fork" in wish:
            answer = os.fork()
            if answer == 0:
                member(wish, cases)
            children[answer] = None
        else:
            answer = children[wish["status"]] = ended(wish["status"], children)
        print(json.dumps(answer), file=answers, flush=True)
    for child in (pid for pid in children if ended(pid, children) is None):
        os.kill(child, signal.SIGKILL)
    os._exit(0)  # nothing to tidy up, and doing so takes seconds


def ended(child: int, children: dict[int, int | None]) -> int | None:
    if children[child] is None:
        done, status = os.waitpid(child, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if done else None
    return children[child]


def member(wish: dict[str, object], cases: object) -> None:
    """Be a process of the pool, and end as an interpreter would."""
    nothing, out = os.open(os.devnull, os.O_RDWR), os.open(str(wish["out"]), os.O_WRONLY | os.O_APPEND)
    for source, target in ((nothing, 0), (nothing, 1), (out, 2)):
        os.dup2(source, target)
    code = 0
    try:
        serve(int(str(wish["fork"])), cases)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def serve(port: int, cases: object) -> None:
    """Receive cases, run them, send back what they returned."""
    connection = Client(("127.0.0.1", port), authkey=bytes.fromhex(os.environ["POOL_KEY"]))
    connection.send(os.getpid())
    while True:
        try:
            name, place, given = connection.recv()
        except EOFError:
            return
        before = dict(os.environ)
        os.environ.update(place)
        started = time.monotonic()
        try:
            answer = ("returned", getattr(cases, name)(**given))
        except SystemExit as leaving:
            answer = ("exited", leaving.code)
        except BaseException:
            answer = ("raised", traceback.format_exc())
        seconds = time.monotonic() - started
        close_group()
        os.environ.clear()
        os.environ.update(before)
        # Plain pickles: torch would have tensors shared with a process that does not know how.
        connection.send_bytes(pickle.dumps((*answer, seconds)))


def close_group() -> None:
    from loopwright.pt.distributed import process_group as group

    if group._opened is not None:
        group._opened.close()
    gc.collect()  # a group that is collected in a forked worker waits there for threads it does not have


if __name__ == "__main__":
    main()

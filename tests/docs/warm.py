"""The `loopwright` command in forks of one process that has imported torch and transformers already.

    python -m tests.docs.warm SOCKET            serves until its standard input is closed
    python tests/docs/warm.py SOCKET ARGUMENTS  runs `loopwright ARGUMENTS` there, in this folder, with these streams
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys

MOST_BYTES = 1 << 20


def ask(path: str, words: list[str]) -> int:
    """The exit code of a command that the server has run."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        request = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        return int(server.recv(16))


def serve(path: str) -> None:
    import transformers

    import loopwright
    from loopwright.cli.main import main

    assert loopwright.Trainer and transformers.PreTrainedModel  # imports what every command needs
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen()
        print("ready", flush=True)
        while select.select([listening, sys.stdin], [], [])[0] == [listening]:
            client, _ = listening.accept()
            with client:
                text, streams, _, _ = socket.recv_fds(client, MOST_BYTES, 3)
                child = os.fork()
                if child == 0:
                    listening.close()
                    client.close()
                    sys.exit(main(take_over(json.loads(text), streams)))
                for stream in streams:
                    os.close(stream)
                client.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def take_over(request: dict[str, object], streams: list[int]) -> list[str]:
    """Become the process that the client would have been."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    words = [str(word) for word in request["words"]]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(str(request["folder"]))
    sys.argv = ["loopwright", *words]
    return words


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1])

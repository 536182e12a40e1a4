"""The `loopwright` command: a table of subcommands.

Exit codes: 0 done; 1 failed; 2 bad input (unknown command or arguments); 75 stopped by a signal after saving (the
same command resumes); 130 interrupted by the user.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

DONE, FAILED, BAD_INPUT, STOPPED, INTERRUPTED = 0, 1, 2, 75, 130


class Command(NamedTuple):
    """A subcommand: `module:function` receives its command line arguments and returns an exit code."""

    target: str
    """A leading dot means this package."""
    help: str


COMMANDS: dict[str, Command] = {
    "args": Command(".commands.args:run", "list or search the training arguments, with default and meaning"),
    "check": Command(".commands.check:run", "try a configuration in a minute: memory, time, one save and load"),
    "completion": Command(".commands.completion:run", "print the completion script for bash, zsh or fish"),
    "compare": Command(".commands.compare:run", "compare runs: results, time ledger, arguments that differ"),
    "convert": Command(".commands.convert:run", "write a checkpoint in the format of transformers' Trainer"),
    "ctl": Command(".commands.ctl:run", "let a run save, evaluate, stop, or change its learning rate"),
    "docs": Command(".commands.docs:main", "write the generated pages of the documentation into a folder"),
    "doctor": Command(".commands.doctor:run", "check devices, backends and communication between ranks"),
    "drill": Command(".commands.drill:run", ("run a training script under injected faults and report what survived")),
    "dryrun": Command(".commands.dryrun:run", "compile a training step for TPUs without a TPU; memory per chip"),
    "env": Command(".commands.env:run", "show versions and devices for a bug report"),
    "explain": Command(".commands.explain:run", "show the plan of a configuration, and the source of each value"),
    "export": Command(".commands.export:run", "write the model of a run as a folder, with a merged adapter"),
    "init": Command(".commands.init:run", "print a configuration for a task to begin with"),
    "launch": Command(".commands.launch:run", "run a script on several processes, or write a cluster's job file"),
    "run": Command("loopwright.compat.script:run", "run a script written for transformers' Trainer on loopwright"),
    "replay": Command(".commands.replay:run", "run a logged step again and compare the metrics"),
    "report": Command(".commands.report:run", "write the page of a run, or one page with several runs"),
    "search": Command(".commands.search:run", "search for good values of a training command"),
    "schema": Command(".commands.schema:run", "print the JSON schema of configurations"),
    "selfcheck": Command(".commands.selfcheck:run", "train ten steps on the CPU and on the device and compare"),
    "train": Command(".commands.train:run", "train what a configuration describes, and resume it"),
    "version": Command(".commands.version:run", "show the version of loopwright"),
    "watch": Command(".commands.watch:run", "follow a run in the terminal, also one of another process"),
}
SCRIPTS = ("launch", "run")
"""Commands whose words are those of a script."""
_FLAGS = {"--version": "version", "-V": "version"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand named by the first argument."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return DONE if words else BAD_INPUT
    name = _FLAGS.get(words[0], words[0])
    if name not in COMMANDS:
        print(_unknown(words[0]), file=sys.stderr)
        return BAD_INPUT
    return _run(name, words[1:])


def usage() -> str:
    """The help page, generated from the table."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in sorted(COMMANDS.items())]
    head = ["usage: loopwright <command> [options]", "", "commands:"]
    tail = [
        "",
        "see `loopwright <command> --help`",
        (
            "exit codes: 0 success, 1 failure, 2 invalid input, 75 stopped after saving (the same command resumes), "
            "130 interrupted"
        ),
    ]
    return "\n".join([*head, *lines, *tail])


def _load(command: Command) -> Callable[[list[str]], int]:
    module, _, function = command.target.partition(":")
    run: Callable[[list[str]], int] = getattr(import_module(module, __package__), function)
    return run


def _run(name: str, words: list[str]) -> int:
    from ..errors import ArgumentsError, LoopwrightError

    as_json = "--json" in words and name not in SCRIPTS
    try:
        return _load(COMMANDS[name])(words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # stdout was closed (`loopwright args | head`)
        sys.stderr.close()
        return DONE
    except LoopwrightError as error:
        from .command import report_error

        return report_error(error, as_json, BAD_INPUT if isinstance(error, ArgumentsError) else FAILED)
    except SystemExit as stop:
        if as_json and stop.code == BAD_INPUT:  # argparse has printed the reason
            text = f"wrong arguments; see `loopwright {name} --help`"
            print(json.dumps({"error": text, "kind": ArgumentsError.__name__, "code": BAD_INPUT}))
        raise


def _unknown(word: str) -> str:
    close = get_close_matches(word, COMMANDS, n=1)
    advice = f"Did you mean '{close[0]}'?" if close else f"There are: {', '.join(sorted(COMMANDS))}."
    return f"loopwright: '{word}' is not a command. {advice}"


if __name__ == "__main__":
    sys.exit(main())

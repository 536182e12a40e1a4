"""`loopwright completion SHELL`: print a script that completes commands, keys and files."""

from __future__ import annotations

from collections.abc import Callable

from ...args.field import advised
from ...errors import ArgumentsError
from ..command import Result, Usage, Words, run_command

WITH_CONFIG = ("check", "explain", "train")
"""Commands that take a configuration and its keys."""


def run(words: list[str]) -> int:
    """Print the script; returns the exit code."""
    return run_command(USAGE, words, _completion)


def _completion(words: Words) -> Result:
    shell = words.first(f"a shell: {', '.join(SCRIPTS)}")
    if shell not in SCRIPTS:
        more = f"use {', '.join(SCRIPTS)}"
        raise ArgumentsError(advised(f"{shell!r} is not a supported shell", shell, SCRIPTS, more))
    script = SCRIPTS[shell](*_words())
    return Result({"shell": shell, "script": script}, script.rstrip("\n"))


def _words() -> tuple[list[str], list[str], list[str]]:
    """The commands, the keys of configurations and the tasks."""
    from ...config.schema import json_schema
    from ...tasks.table import TASKS
    from ..main import COMMANDS

    schema = json_schema()
    dotted = [
        f"{block}.{key}"
        for block in ("model", "lora")
        for form in schema["properties"][block]["anyOf"]
        for key in form.get("properties", ())
    ]
    data = {f"data.{key}" for each in schema["allOf"] for key in each["then"]["properties"]["data"]["properties"]}
    keys = [key for key in schema["properties"] if key not in ("$schema", "data", "lora")]
    return sorted(COMMANDS), sorted([*keys, *dotted, *data]), list(TASKS)


def _bash(commands: list[str], keys: list[str], tasks: list[str]) -> str:
    flags = " ".join(f"--{key}" for key in keys)
    return f"""# bash: eval "$(loopwright completion bash)"
_loopwright() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(commands)}" -- "$word"))
  elif [ "$command" = init ]; then
    COMPREPLY=($(compgen -W "{" ".join(tasks)}" -- "$word"))
  elif [[ " {" ".join(WITH_CONFIG)} " == *" $command "* && "$word" == -* ]]; then
    COMPREPLY=($(compgen -W "--json --help {flags}" -- "$word"))
  elif [ "$command" = ctl ] && [ "$COMP_CWORD" -eq 3 ]; then
    COMPREPLY=($(compgen -W "save evaluate stop set" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _loopwright loopwright
"""


def _zsh(commands: list[str], keys: list[str], tasks: list[str]) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(commands, keys, tasks).replace(
        "# bash: ", "# zsh: ", 1
    ).replace("completion bash", "completion zsh", 1)


def _fish(commands: list[str], keys: list[str], tasks: list[str]) -> str:
    lines = ["# fish: loopwright completion fish | source"]
    lines += [f"complete -c loopwright -n __fish_use_subcommand -f -a '{' '.join(commands)}'"]
    lines += [f"complete -c loopwright -n '__fish_seen_subcommand_from init' -f -a '{' '.join(tasks)}'"]
    seen = f"__fish_seen_subcommand_from {' '.join(WITH_CONFIG)}"
    lines += [f"complete -c loopwright -n '{seen}' -l '{key}' -r" for key in keys]
    return "\n".join(lines) + "\n"


SCRIPTS: dict[str, Callable[[list[str], list[str], list[str]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
USAGE = Usage(
    "completion", "|".join(SCRIPTS), 'Print a completion script, such as: eval "$(loopwright completion bash)"'
)

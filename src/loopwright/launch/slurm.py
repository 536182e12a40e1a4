"""An sbatch script that runs the launch on every node of a job and requeues itself."""

from __future__ import annotations

import shlex

from ..core.shutdown.signals import STOPPED_AFTER_SAVING
from ..errors import ArgumentsError
from .request import LaunchRequest

TEMPLATE = """\
#!/bin/bash
{directives}

# Written by `loopwright launch --slurm`. {before_limit} seconds before the time limit, and when the job is preempted,
# every rank saves one checkpoint and exits with {saved}; the job is requeued and resumes from there.
set -uo pipefail
{before}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 12000))  # below the ports that are given to clients
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then export LOOPWRIGHT_RESUME=auto; fi

srun --kill-on-bad-exit=0 {command} &
step=$!
# The batch shell gets the signal; srun hands it to the agents, and they to their processes.
trap 'kill -TERM "$step" 2> /dev/null' TERM USR1

wait "$step"; code=$?
while kill -0 "$step" 2> /dev/null; do wait "$step"; code=$?; done  # a trap ends `wait` early

if [ "$code" -eq {saved} ]; then
    echo "saved and stopped: requeuing"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def script(request: LaunchRequest) -> str:
    """The text of the sbatch script."""
    most = request.nodes[1]
    directives = [f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}" for name, value in _directives(request)]
    return TEMPLATE.format(
        directives="\n".join(directives),
        before_limit=request.own.signal_before,
        before="".join(f"{line}\n" for line in request.own.before),
        saved=STOPPED_AFTER_SAVING,
        command=_command(request, most),
    )


def _directives(request: LaunchRequest) -> list[tuple[str, str]]:
    own = request.own
    gpus = own.processes if own.gpus is None else own.gpus
    table = {
        "job-name": request.name,
        "nodes": str(request.nodes[1]) if not request.is_elastic else "{}-{}".format(*request.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(gpus) if gpus else None,
        "cpus-per-task": str(own.cpus) if own.cpus else None,
        "time": own.time,
        "output": "%x-%j.out",
        "open-mode": "append",  # a requeued job appends
        "requeue": "",
        "signal": f"B:TERM@{own.signal_before}",
    }
    for given in own.sbatch:
        name, _, value = given.removeprefix("--").partition("=")
        if not name:
            raise ArgumentsError(f"--sbatch {given!r}: use the form option=value, such as partition=gpu")
        table[name] = value
    return [(name, value) for name, value in table.items() if value is not None]


def _command(request: LaunchRequest, nodes: int) -> str:
    words = ["loopwright", "launch", "--nnodes", '"$SLURM_JOB_NUM_NODES"']
    if request.is_elastic:
        words[3] = f"{request.nodes[0]}:{nodes}"
    for name in ("processes", "threads", "interface", "rejoin"):
        value = getattr(request.own, name)
        if value is not None:
            words += [f"--{name}", shlex.quote(str(value))]
    if request.own.no_log_files:
        words.append("--no-log-files")
    words += ["--host", '"$head:$port"', "--rdzv-id", '"$SLURM_JOB_ID"']
    return " ".join([*words, *map(shlex.quote, request.passed_on), *map(shlex.quote, request.script)])

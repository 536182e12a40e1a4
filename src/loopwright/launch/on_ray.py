"""Running a script on Ray Train workers: Ray places, connects and restarts the processes."""

from __future__ import annotations

import os
import runpy
import secrets
import sys
from pathlib import Path
from typing import Any

from ..core.resuming.run_record import LAUNCH, RESUME
from ..core.shutdown.signals import STOPPED_AFTER_SAVING
from ..errors import ArgumentsError, LoopwrightError, MissingPackage
from ..notices import logger
from .machine import Machine
from .request import LaunchRequest

RESTARTS = 3


def workers(text: str) -> int | tuple[int, int]:
    """The number of workers in `4`, or the bounds in `1:4`."""
    low, colon, high = text.partition(":")
    try:
        bounds = int(low), int(high) if colon else int(low)
    except ValueError:
        bounds = (0, 0)
    if not 1 <= bounds[0] <= bounds[1]:
        raise ArgumentsError(f"--ray {text}: use a number of workers, or MIN:MAX such as 1:4")
    return bounds if colon else bounds[0]


def settings(request: LaunchRequest, machine: Machine) -> dict[str, Any]:
    """The settings passed to Ray, as plain values."""
    own = request.own
    given = [f"--{name.replace('_', '-')}" for name in sorted(request.given) if name not in ("max_restarts", "module")]
    if own.processes is not None:
        given.append("--processes")
    if given:
        raise ArgumentsError(f"--ray places the processes itself and ignores {', '.join(given)}")
    accelerated = machine.devices > 0
    cores = own.threads or 1
    resources = {"CPU": cores, **({"GPU": 1} if accelerated else {})}
    return {
        "workers": workers(own.ray),
        "use_gpu": accelerated,
        "backend": "nccl" if machine.kind == "cuda" else "gloo",
        "resources": resources,
        "restarts": request.values.max_restarts if "max_restarts" in request.given else RESTARTS,
        "name": request.name,
        "storage": own.ray_storage and str(Path(own.ray_storage).absolute()),
        "environment": {
            "OMP_NUM_THREADS": str(cores),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            LAUNCH: secrets.token_hex(8),
        },
    }


def run_on_ray(request: LaunchRequest, machine: Machine) -> int:
    """Run the script on the workers; returns the exit code."""
    wanted = settings(request, machine)
    if request.own.dry_run:
        print(wanted)
        return 0
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise MissingPackage("ray", needed_for="launch --ray", install="'ray[train]'") from error

    ours = not ray.is_initialized()
    if ours:
        ray.init(
            address=request.own.ray_address or os.environ.get("RAY_ADDRESS"),
            runtime_env={"env_vars": wanted["environment"]},
            include_dashboard=False,
            log_to_driver=True,
        )
    scaling = ScalingConfig(
        num_workers=wanted["workers"], use_gpu=wanted["use_gpu"], resources_per_worker=wanted["resources"]
    )
    run_config = RunConfig(
        name=wanted["name"],
        storage_path=wanted["storage"],
        failure_config=FailureConfig(max_failures=wanted["restarts"]),
    )
    script = {"words": list(request.script), "module": bool(request.values.module), "folder": os.getcwd()}
    trainer = TorchTrainer(
        _work,
        train_loop_config=script,
        torch_config=TorchConfig(backend=wanted["backend"]),
        scaling_config=scaling,
        run_config=run_config,
    )
    try:
        trainer.fit()
    except Exception as error:  # Ray has its own exception classes, and prints the worker's traceback
        return _ended(error)
    finally:
        if ours:
            ray.shutdown()
    return 0


def _ended(error: BaseException) -> int:
    chain: BaseException | None = error
    texts = []
    while chain is not None:
        texts.append(str(chain))
        chain = chain.__cause__ or chain.__context__
    if any(StoppedAfterSaving.MARK in text for text in texts):
        logger.warning("every worker saved and stopped; the same command resumes from there")
        return STOPPED_AFTER_SAVING
    raise LoopwrightError(f"the run on Ray failed: {texts[0]}") from error


class StoppedAfterSaving(RuntimeError):
    """A worker saved a checkpoint and exited because of a signal."""

    MARK = f"exit code {STOPPED_AFTER_SAVING}: saved and stopped"


def _work(script: dict[str, Any]) -> None:
    """The function of a worker: run the script in the folder of the launch command."""
    os.chdir(script["folder"])
    # Ray does not pass the number of restarts, so resume from any checkpoint of this run.
    os.environ.setdefault(RESUME, "auto")
    target, *words = script["words"]
    sys.argv = [target, *words]
    sys.path.insert(0, script["folder"] if script["module"] else str(Path(target).resolve().parent))
    try:
        if script["module"]:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except SystemExit as end:
        if end.code == STOPPED_AFTER_SAVING:
            raise StoppedAfterSaving(StoppedAfterSaving.MARK) from end
        if end.code not in (None, 0):
            raise RuntimeError(f"the script exited with {end.code!r}") from end

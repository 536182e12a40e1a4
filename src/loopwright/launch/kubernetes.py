"""Kubernetes manifests of a launch: Kubeflow's PyTorchJob (training operator v1) and TrainJob (trainer v2)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

from ..errors import ArgumentsError
from .request import LaunchRequest
from .torchrun import SHUTDOWN

RESTARTS = 10
"""Restarts of a job: pods are moved often, and each time the job resumes from its last checkpoint."""


def manifest(request: LaunchRequest) -> str:
    """The manifest as YAML."""
    if not request.own.image:
        raise ArgumentsError("--kubernetes needs --image, a container image with the script and loopwright")
    return str(yaml.safe_dump(KINDS[request.own.kind](request), sort_keys=False))


def pytorch_job(request: LaunchRequest) -> dict[str, Any]:
    """A PyTorchJob; the operator sets torchrun's number of nodes and rendezvous through PET_* variables."""
    low, high = request.nodes
    replica = {
        "replicas": high,
        # Not `ExitCode`: the operator would treat 75 (saved and stopped, start again) as a permanent failure.
        "restartPolicy": "OnFailure",
        "template": {"spec": _pod(request)},
    }
    spec: dict[str, Any] = {
        "elasticPolicy": {
            "rdzvBackend": "c10d",
            "minReplicas": low,
            "maxReplicas": high,
            "maxRestarts": RESTARTS,
        },
        "runPolicy": {"backoffLimit": RESTARTS, "cleanPodPolicy": "None"},
        "pytorchReplicaSpecs": {"Worker": replica},
    }
    if request.own.processes:
        spec["nprocPerNode"] = str(request.own.processes)
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": _metadata(request), "spec": spec}


def train_job(request: LaunchRequest) -> dict[str, Any]:
    """A TrainJob on the cluster's `torch-distributed` runtime."""
    if request.is_elastic:
        raise ArgumentsError(
            f"--nnodes {request.values.nnodes}: a TrainJob has a fixed number of nodes; use --kind PyTorchJob"
        )
    own = request.own
    trainer: dict[str, Any] = {
        "image": own.image,
        "command": _command(request),
        "env": _variables(request),
        "numNodes": request.nodes[1],
    }
    if own.processes:
        trainer["numProcPerNode"] = own.processes
    if _resources(request):
        trainer["resourcesPerNode"] = _resources(request)
    volumes, mounts = _volumes(request)
    pod = {"volumes": volumes, "containers": [{"name": "node", "volumeMounts": mounts}]}
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    patch = {"manager": "loopwright", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer, "runtimePatches": [patch]}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(request),
        "spec": spec,
    }


KINDS: dict[str, Callable[[LaunchRequest], dict[str, Any]]] = {"PyTorchJob": pytorch_job, "TrainJob": train_job}


def _pod(request: LaunchRequest) -> dict[str, Any]:
    volumes, mounts = _volumes(request)
    body = {
        "name": "pytorch",  # the name that the operator requires
        "image": request.own.image,
        "command": _command(request),
        "env": _variables(request),
        "volumeMounts": mounts,
    }
    if _resources(request):
        body["resources"] = _resources(request)
    # The grace period must cover the time that the agent gives its processes.
    return {"terminationGracePeriodSeconds": SHUTDOWN + 30, "containers": [body], "volumes": volumes}


def _command(request: LaunchRequest) -> list[str]:
    """The command without nodes and rendezvous, which the operator sets."""
    words = ["loopwright", "launch"]
    if request.own.threads:
        words += ["--threads", str(request.own.threads)]
    return [*words, *request.passed_on, *request.script]


def _variables(request: LaunchRequest) -> list[dict[str, str]]:
    variables = {"LOOPWRIGHT_RESUME": "auto"}  # a restarted pod has no other sign of a restart
    for given in request.own.variable:
        name, equals, value = given.partition("=")
        if not equals or not name:
            raise ArgumentsError(f"--variable {given!r}: use the form NAME=VALUE")
        variables[name] = value
    return [{"name": name, "value": value} for name, value in variables.items()]


def _resources(request: LaunchRequest) -> dict[str, Any]:
    own = request.own
    gpus = own.processes if own.gpus is None else own.gpus
    limits = {
        "nvidia.com/gpu": gpus or None,
        "cpu": str(own.cpus) if own.cpus else None,
        "memory": own.memory,
    }
    kept = {name: value for name, value in limits.items() if value}
    return {"limits": kept, "requests": dict(kept)} if kept else {}


def _volumes(request: LaunchRequest) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    # Data loading workers pass batches through shared memory; the 64 MiB default of a container is too small.
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    for number, given in enumerate(request.own.claim):
        claim, colon, path = given.partition(":")
        if not colon or not path.startswith("/"):
            raise ArgumentsError(f"--claim {given!r}: use the form CLAIM:/path/in/the/container")
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{number}", "mountPath": path})
    return volumes, mounts


def _metadata(request: LaunchRequest) -> dict[str, str]:
    name = re.sub(r"[^a-z0-9-]+", "-", request.name.lower()).strip("-")[:63] or "train"
    name = name if name[0].isalpha() else f"job-{name}"[:63]
    return {"name": name, **({"namespace": request.own.namespace} if request.own.namespace else {})}

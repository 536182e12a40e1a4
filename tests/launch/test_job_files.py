"""The Slurm script is run by bash with stand-ins for Slurm's commands; the manifests are read back as YAML."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from loopwright.cli import main as cli

from .jobs import job

LIMITS = {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": 8}


def written(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["launch", *words]) == 0
    return capsys.readouterr().out


# ---- Slurm --------------------------------------------------------------------------------------------------------


def directives(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_the_directives_say_what_was_asked(capsys):
    words = [
        "--slurm",
        "-",
        "--nnodes",
        "4",
        "-n",
        "8",
        "--cpus",
        "64",
        "--time",
        "1:00:00",
        "--signal-before",
        "90",
        "--sbatch",
        "partition=big",
        "--sbatch",
        "exclusive",
        "--sbatch",
        "output=/logs/%j",
        "train.py",
    ]
    found = directives(written(words, capsys))
    assert found == {
        "job-name": "train", "nodes": "4", "ntasks-per-node": "1", "gpus-per-node": "8", "cpus-per-task": "64",
        "time": "1:00:00", "output": "/logs/%j", "open-mode": "append", "requeue": "", "signal": "B:TERM@90",
        "partition": "big", "exclusive": "",
    }  # fmt: skip


def test_elastic_jobs_ask_for_a_range_of_machines(capsys):
    text = written(["--slurm", "-", "--nnodes", "2:6", "-n", "8", "train.py"], capsys)
    assert directives(text)["nodes"] == "2-6" and "--nnodes 2:6" in text


def test_words_with_spaces_survive(capsys):
    text = written(["--slurm", "-", "train.py", "--name", "a b; rm -rf $HOME"], capsys)
    assert "'a b; rm -rf $HOME'" in text


def test_the_file_is_written_where_asked(tmp_path, capsys):
    assert cli.main(["launch", "--slurm", str(tmp_path / "jobs" / "a.sbatch"), "train.py"]) == 0
    assert "sbatch" in capsys.readouterr().err
    check = subprocess.run(["bash", "-n", str(tmp_path / "jobs" / "a.sbatch")], capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


STAND_INS = {
    "srun": 'shift  # --kill-on-bad-exit\nexec "$@"\n',
    "scontrol": 'case "$1" in show) echo 127.0.0.1;; requeue) echo "$2" >> requeued;; esac\n',
    "loopwright": f'exec {sys.executable} -m loopwright "$@"\n',
}


def stand_ins(folder: Path) -> str:
    folder.mkdir()
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("how", "code", "requeued"),
    [("wait", 75, True), ("error", 1, False), pytest.param("fine", 0, False, marks=pytest.mark.grid)],
)
def test_the_script_goes_back_into_the_queue_after_the_signal_before_the_limit(how, code, requeued, tmp_path, capsys):
    """bash runs the script itself; only srun, scontrol and the queue are stand-ins."""
    from .jobs import SCRIPTS

    text = written(["--slurm", "-", "-n", "2", str(SCRIPTS / "ends.py"), how], capsys)
    (tmp_path / "job.sbatch").write_text(text)
    more = {"PATH": stand_ins(tmp_path / "bin"), "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "here", "SLURM_RESTART_COUNT": "1"}  # fmt: skip
    with job(["bash", "job.sbatch"], tmp_path, more=more) as started:
        if how == "wait":
            started.until(lambda: "ready" in started.text())
            started.signal(signal.SIGTERM)
        assert started.wait(300) == code, started.text()
        assert "resume auto" in started.text()  # SLURM_RESTART_COUNT says that it has been in the queue before
    assert (tmp_path / "requeued").exists() == requeued


# ---- Kubernetes ---------------------------------------------------------------------------------------------------


def manifest(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    return yaml.safe_load(written(["--kubernetes", "-", "--image", "registry/train:1", *words], capsys))


def test_a_pytorch_job(capsys):
    words = [
        "--nnodes",
        "1:4",
        "-n",
        "8",
        "--cpus",
        "16",
        "--memory",
        "64Gi",
        "--claim",
        "data:/data",
        "--variable",
        "A=b=c",
        "--namespace",
        "team",
        "--threads",
        "2",
        "--max-restarts",
        "7",
        "my_Train.py",
        "--lr",
        "1",
    ]
    found = manifest(words, capsys)
    assert (found["apiVersion"], found["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert found["metadata"] == {"name": "my-train", "namespace": "team"}
    policy = found["spec"]["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"], policy["rdzvBackend"]) == (1, 4, "c10d")
    assert found["spec"]["nprocPerNode"] == "8"
    worker = found["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert (worker["replicas"], worker["restartPolicy"]) == (4, "OnFailure")
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # the operator looks for this name
    expected = "loopwright launch --threads 2 --max-restarts 7 my_Train.py --lr 1"
    assert container["command"] == expected.split()
    assert {"name": "LOOPWRIGHT_RESUME", "value": "auto"} in container["env"]
    assert {"name": "A", "value": "b=c"} in container["env"]
    assert container["resources"]["limits"] == container["resources"]["requests"] == LIMITS
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/data"}
    assert {each["name"] for each in pod["volumes"]} == {each["name"] for each in container["volumeMounts"]}
    assert pod["terminationGracePeriodSeconds"] > 300  # longer than the agent waits for its processes


def test_a_train_job(capsys):
    words = ["--kind", "TrainJob", "--nnodes", "4", "-n", "8", "--cpus", "16", "--memory", "64Gi", "-m", "pkg.train"]
    found = manifest(words, capsys)
    assert (found["apiVersion"], found["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = found["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 8)
    assert trainer["command"] == ["loopwright", "launch", "-m", "pkg.train"]
    assert trainer["resourcesPerNode"]["limits"] == LIMITS
    assert found["spec"]["runtimeRef"] == {"name": "torch-distributed"}


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--claim", "data"], "CLAIM:/path"),
        (["--variable", "A"], "NAME=VALUE"),
        (["--kind", "TrainJob", "--nnodes", "1:2"], "fixed number of nodes"),
    ],
)
def test_bad_manifests_are_refused(words, part, capsys):
    assert cli.main(["launch", "--kubernetes", "-", "--image", "i", *words, "train.py"]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("name", ["9lives.py", "UPPER_case.py", "-.py", "x" * 90 + ".py"])
def test_names_are_what_kubernetes_accepts(name, capsys):
    import re

    found = manifest([f"./{name}"], capsys)["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", found)

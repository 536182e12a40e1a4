"""What `loopwright launch` makes of its words: torchrun's command and environment, without running anything."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from torch.distributed.run import get_args_parser, parse_args

from loopwright.cli import main as cli
from loopwright.cli.commands import launch as command
from loopwright.errors import ArgumentsError
from loopwright.launch import network, torchrun
from loopwright.launch.machine import Machine
from loopwright.launch.request import LaunchRequest, read
from loopwright.launch.torchrun import Way

HOME = Way(interface="lo")
KNOWS = frozenset(action.dest for action in get_args_parser()._actions)


def asked(*words: str, environment: dict[str, str] | None = None) -> LaunchRequest:
    return read(words, command.parser(), get_args_parser(), environment or {})


def parsed(*words: str, machine: Machine | None = None, way: Way = HOME, environment: dict[str, str] | None = None):
    """torchrun's own reading of the words it would be started with."""
    request = asked(*words, environment=environment)
    return parse_args(torchrun.words(request, machine or Machine(0, 8), way, knows=KNOWS))


@pytest.mark.parametrize(
    ("words", "machine", "count"),
    [
        (["train.py"], Machine(0, 8), 1),
        (["train.py"], Machine(4, 8, "cuda"), 4),
        (["--processes", "3", "train.py"], Machine(4, 8, "cuda"), 3),
        (["-n", "3", "train.py"], Machine(0, 8), 3),
        (["--nproc-per-node", "5", "train.py"], Machine(4, 8, "cuda"), 5),
        (["--nproc_per_node=5", "train.py"], Machine(4, 8, "cuda"), 5),
    ],
)
def test_processes_come_from_the_words_or_the_devices(words, machine, count):
    assert int(parsed(*words, machine=machine).nproc_per_node) == count
    assert torchrun.processes(asked(*words), machine) == count


def test_every_option_of_torchrun_is_passed_on():
    """Each option with a value is given one, and torchrun reads exactly that."""
    samples = {"nnodes": "2:3", "nproc_per_node": "7", "rdzv_backend": "etcd", "start_method": "fork", "tee": "1",
               "redirects": "2", "local_ranks_filter": "1,2", "numa_binding": "node"}  # fmt: skip
    for action in get_args_parser()._actions:
        if not action.option_strings or action.dest == "help" or action.nargs == 0:
            continue
        choice = str(next(iter(action.choices))) if action.choices else "5"
        value = samples.get(action.dest, choice)
        option = action.option_strings[0]
        alone = getattr(parse_args([f"{option}={value}", "train.py"]), action.dest)
        host = [] if action.dest in ("nnodes", "rdzv_endpoint", "master_addr", "node_rank") else ["--host", "h"]
        words = [*host, "train.py"]
        for given in ([f"{option}={value}"], [option, value]):
            found = getattr(parsed(*given, *words), action.dest)
            expected = f"{alone},is_host=true" if action.dest == "rdzv_conf" else alone
            assert found == expected, action.dest


def test_the_script_keeps_its_own_words():
    found = parsed("-n", "2", "train.py", "--processes", "9", "--nnodes", "7", "--", "-x")
    assert found.training_script == "train.py"
    assert found.training_script_args == ["--processes", "9", "--nnodes", "7", "--", "-x"]
    assert int(found.nproc_per_node) == 2


def test_modules_are_run_as_modules():
    found = parsed("-n", "2", "-m", "package.train", "--lr", "1")
    assert found.module and found.training_script == "package.train" and found.training_script_args == ["--lr", "1"]


def test_one_machine_needs_no_address_and_no_free_port():
    found = parsed("train.py")
    assert (found.rdzv_backend, found.rdzv_endpoint, found.local_addr) == ("c10d", "127.0.0.1:0", "127.0.0.1")


def test_each_launch_is_a_job_of_its_own():
    assert parsed("train.py").rdzv_id != parsed("train.py").rdzv_id


@pytest.mark.parametrize(("hosts", "conf"), [(True, "is_host=true"), (False, "is_host=false")])
def test_machines_meet_where_they_were_told(hosts, conf):
    way = Way("node1", 29400, hosts, "10.0.0.7", "eth1")
    found = parsed("--nnodes", "2", "--host", "node1", "train.py", way=way)
    assert (found.rdzv_endpoint, found.rdzv_conf, found.local_addr) == ("node1:29400", conf, "10.0.0.7")
    assert found.rdzv_id == "none"  # the same on every machine
    kept = parsed("--nnodes", "2", "--host", "node1", "--rdzv-conf", "timeout=9", "train.py", way=way)
    assert kept.rdzv_conf == f"timeout=9,{conf}"


def test_elastic_jobs_may_restart_and_others_may_not():
    way = Way("node1", 29400)
    assert parsed("--nnodes", "1:4", "--host", "node1", "train.py", way=way).max_restarts == 3
    assert parsed("--nnodes", "1:4", "--host", "node1", "--max-restarts", "9", "train.py", way=way).max_restarts == 9
    assert parsed("--nnodes", "4", "--host", "node1", "train.py", way=way).max_restarts == 0


def test_what_an_operator_has_set_stays(monkeypatch):
    """Kubeflow describes the job to torchrun in PET_ variables, which override loopwright's defaults."""
    job = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_RDZV_ENDPOINT": "head:1234", "PET_RDZV_ID": "abc"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    found = parsed("train.py", way=Way("head", 1234, False), environment=job)
    assert (found.nnodes, found.nproc_per_node, found.rdzv_endpoint, found.rdzv_id) == ("2", "8", "head:1234", "abc")


def test_fixed_ranks_are_left_to_torchrun(monkeypatch):
    job = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "head", "PET_MASTER_PORT": "23456"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    request = asked("train.py", environment=job)
    assert request.is_static
    found = parsed("train.py", way=torchrun.find_way(request), environment=job)
    assert (found.rdzv_backend, found.node_rank, found.master_addr) == ("static", 1, "head")


@pytest.mark.parametrize(
    ("cores", "count", "threads"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 4, 1), (64, 8, 8), (1, 1, 1)]
)
def test_threads_are_shared_out(cores, count, threads):
    request = asked("-n", str(count), "train.py")
    made = torchrun.environment(request, Machine(0, cores), HOME, {})
    assert made["OMP_NUM_THREADS"] == str(threads)
    assert "OMP_NUM_THREADS" not in torchrun.environment(request, Machine(0, cores), HOME, {"OMP_NUM_THREADS": "5"})
    said = asked("-n", str(count), "--threads", "3", "train.py")
    assert torchrun.environment(said, Machine(0, cores), HOME, {"OMP_NUM_THREADS": "5"})["OMP_NUM_THREADS"] == "3"


def test_interfaces_of_the_way_are_told_to_the_backends():
    made = torchrun.environment(asked("train.py"), Machine(0, 2), Way("h", 1, True, "10.0.0.1", "eth7"), {})
    assert made["GLOO_SOCKET_IFNAME"] == "eth7" and "NCCL_SOCKET_IFNAME" not in made
    made = torchrun.environment(asked("--interface", "ib0", "train.py"), Machine(0, 2), HOME, {})
    assert made["NCCL_SOCKET_IFNAME"] == "ib0"
    assert "GLOO_SOCKET_IFNAME" not in torchrun.environment(
        asked("train.py"), Machine(0, 2), HOME, {"GLOO_SOCKET_IFNAME": "x"}
    )


def test_each_rank_has_log_files():
    found = parsed("train.py")
    assert (found.log_dir, found.tee, found.local_ranks_filter) == ("loopwright-logs", "3", "0")
    assert parsed("--no-log-files", "train.py").log_dir is None
    assert parsed("--log-dir", "mine", "train.py").log_dir == "mine"


def test_an_older_torchrun_is_not_given_what_it_does_not_know():
    request = asked("train.py")
    words = torchrun.words(request, Machine(0, 2), HOME, knows=KNOWS - {"shutdown_timeout", "signals_to_handle"})
    assert not [word for word in words if word.startswith(("--shutdown", "--signals"))]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--nprocs-per-node", "2", "train.py"], "did you mean --nproc-per-node?"),
        (["--xyzzy", "train.py"], "--xyzzy is not an option"),
        ([], None),
        (["-n", "2"], "no script was given"),
        (["-n", "0", "train.py"], "--processes 0"),
        (["-n", "2", "--threads", "-1", "train.py"], "--threads -1"),
        (["-n", "2", "--nproc-per-node", "2", "train.py"], "the same; use only one"),
        (["--nnodes", "2", "train.py"], "needs --host ADDRESS"),
        (["--nnodes", "4:2", "--host", "h", "train.py"], "--nnodes 4:2"),
        (["--nnodes", "two", "--host", "h", "train.py"], "--nnodes two"),
        (["--nnodes", "2", "--host", "no-such-host.invalid", "train.py"], "cannot be resolved"),
        (["--nnodes", "2", "--host", "h:port", "train.py"], "not a port number"),
        (["--slurm", "-", "--ray", "2", "train.py"], "are mutually exclusive"),
        (["--slurm", "-", "--take-over", "train.py"], "--take-over with --slurm: not available"),
        (["--kubernetes", "-", "train.py"], "needs --image"),
        (["--ray", "x", "train.py"], "--ray x"),
        (["--ray", "2", "-n", "2", "train.py"], "ignores --processes"),
    ],
)
def test_bad_input_is_said_before_anything_runs(words, part, capsys):
    assert cli.main(["launch", *words]) == 2
    if part:
        assert part in capsys.readouterr().err


def test_a_dry_run_is_a_command_that_torchrun_understands(capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cli.main(["launch", "-n", "2", "--dry-run", "train.py", "a b"]) == 0
    shown = capsys.readouterr().out
    assert "OMP_NUM_THREADS=" in shown and "torchrun --nproc-per-node=2" in shown and shown.endswith("train.py 'a b'\n")


def test_help_names_the_options(capsys):
    with_help = cli.main(["launch", "--help"])
    text = capsys.readouterr().out
    assert with_help == 0 and all(option in text for option in ("--slurm", "--kubernetes", "--ray", "--host"))


# ---- addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node1", ("node1", 29400)),
        ("node1:7", ("node1", 7)),
        ("10.0.0.1:7", ("10.0.0.1", 7)),
        ("[::1]:7", ("::1", 7)),
        ("::1", ("::1", 29400)),
        ("[::1]", ("::1", 29400)),
    ],
)
def test_endpoints_are_read(text, found):
    assert network.endpoint(text) == found


def test_this_machine_knows_its_own_addresses():
    assert network.is_here("127.0.0.1") and network.is_here("localhost")
    assert not network.is_here("192.0.2.1")  # reserved for documentation
    assert network.address_towards("127.0.0.1", 1) == "127.0.0.1"
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("192.0.2.1") is None


def test_the_second_agent_of_a_machine_does_not_host():
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        request = asked("--nnodes", "1:2", "--host", f"127.0.0.1:{port}", "train.py")
        assert torchrun.find_way(request).is_host
        server.listen()
        assert not torchrun.find_way(request).is_host


def test_options_may_come_in_any_order():
    options = [["-n", "2"], ["--host", "h:1"], ["--nnodes", "2"], ["--max-restarts=4"]]
    for order in itertools.permutations(options):
        found = parsed(*itertools.chain(*order), "train.py", way=Way("h", 1))
        assert (found.nproc_per_node, found.nnodes, found.max_restarts) == ("2", "2", 4)


def test_writing_job_files_imports_no_torchrun_agent():
    """Job files are written on login nodes: nothing is started there."""
    code = (
        "import sys; from loopwright.cli.main import main; main(['launch', '--slurm', '-', 'train.py']); "
        "print('agent' if 'loopwright.launch.agent' in sys.modules else 'none')"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout
    assert shown.endswith("none\n") and "#SBATCH" in shown


def test_one_node_stays_on_the_loopback_interface_unless_another_is_chosen():
    way = torchrun.find_way(asked("train.py"))
    made = torchrun.environment(asked("train.py"), Machine(0, 2), way, {})
    assert way.is_alone and made["GLOO_SOCKET_IFNAME"] == "lo" and made["NCCL_SOCKET_IFNAME"] == "=lo"
    with pytest.raises(ArgumentsError, match="there is no 'eth99'; this machine has .*lo"):
        torchrun.find_way(asked("--interface", "eth99", "train.py"))

"""What every test runs under: offline, one thread, seeded, and with folders of its own."""

from __future__ import annotations

import os
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src"
# Tests that start another Python run it on these sources, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))

# Tests run beside each other: two threads each would wait for cores most of the time, also in processes they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

IN_MEMORY = Path("/dev/shm")
ENOUGH = 8 * 2**30
"""Bytes for the folders of all tests of a run and of the one before it."""


def is_roomy(folder: Path) -> bool:
    """Whether the folders of tests fit there, and scripts in them can be run."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return False
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize >= ENOUGH and not found.f_flag & os.ST_NOEXEC


# Runs wait for the disk several times in every save; most tests are about something else than the disk.
if is_roomy(IN_MEMORY):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

# Before anything imports transformers, datasets or tokenizers: they read these once.
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "LOOPWRIGHT_KEPT_PLANS": "off",  # tests do not depend on what others have trained
    }
)

import gc
import logging
import random
import sys
import uuid
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest

FREE = SOURCES.parent / "tests" / "core"
"""The folder whose tests run without torch."""
DETERMINISTIC = ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC")
"""Variables that `full_determinism` sets, also for the processes that a later test starts."""

hypothesis.settings.register_profile(
    "house",
    deadline=None,  # a busy machine is not a failure
    derandomize=True,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("house")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def _default_log_levels() -> Iterator[None]:
    """The levels of a fresh process: trainers and other packages set them for the whole process."""
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("loopwright").setLevel(logging.NOTSET)
    yield


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a temporary folder, so that a default output folder lands there."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _torch_as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed torch, and undo what a test that switches on determinism leaves in it."""
    if not needs_torch(request.node):
        yield
        return
    import torch

    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    environment = {name: os.environ.get(name) for name in DETERMINISTIC}
    yield
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


@pytest.fixture(autouse=True)
def _transformers_as_found() -> Iterator[None]:
    """Tests after this one compare with transformers' own classes."""
    yield
    found = sys.modules.get("loopwright.compat.installation")
    if found is not None and found.is_installed():
        found.uninstall()
        pytest.fail("the test has left loopwright's classes in the place of transformers' own")


def needs_torch(item: pytest.Item) -> bool:
    """Whether a test may use torch."""
    return FREE not in item.path.parents


@pytest.fixture
def output_dir(tmp_path: Path) -> str:
    """A folder for a run, not made yet."""
    return str(tmp_path / "run")


@pytest.fixture
def doubles_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes its losses on `logits.float()`, which would take half the digits of a double."""
    from torch import Tensor, float64

    single = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda self: self if self.dtype is float64 else single(self))


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A place for a run in a store, which is in memory; nobody else claims it at the same moment."""
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setattr("loopwright.core.checkpoint.ownership.owner.SETTLE", 0.01)
    name = uuid.uuid4().hex
    yield f"memory://{name}/run"
    store = fsspec.filesystem("memory")
    if store.isdir(f"/{name}"):
        store.rm(f"/{name}", recursive=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases of the whole grids run with `-m grid`; without it, the spread that is not marked."""
    if "grid" in (config.getoption("-m") or ""):
        return
    whole = [item for item in items if item.get_closest_marker("grid")]
    if whole:
        config.hook.pytest_deselected(items=whole)
        items[:] = [item for item in items if not item.get_closest_marker("grid")]


_frozen_modules = 0
"""How many modules were imported when the collector last set apart what there is."""


def set_apart_what_is_imported() -> None:
    """After many imports: keep the collector from going through them again, half a second each time."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules + 100:
        _frozen_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before the first test: the suite runs on several processes, and results must not depend on how many there are."""
    set_apart_what_is_imported()
    if any(map(needs_torch, session.items)):
        import torch

        torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before TensorFlow computes anything in this process: two logical devices, for tests of replicas."""
    set_apart_what_is_imported()
    mark = item.get_closest_marker("xdist_group")
    if mark is not None and "tensorflow" in mark.args:
        split_cpu()


def split_cpu() -> None:
    """Split the CPU of TensorFlow, if it is installed and not yet split, in two; one thread for each operation."""
    from importlib.util import find_spec

    if find_spec("tensorflow") is None:
        return
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    if tf.config.get_logical_device_configuration(cpu) is None:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)


@pytest.fixture
def only_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of a source and a target in groups, as on a GPU without loopwright's kernels."""
    from loopwright.speed.planner import choice
    from loopwright.speed.planner.decision import PAIRED

    monkeypatch.setattr(choice, "LAYOUTS", tuple(name for name in choice.LAYOUTS if name != PAIRED))

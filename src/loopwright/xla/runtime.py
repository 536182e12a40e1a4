"""torch_xla itself: starting it, ending a step, its random stream, its counters. Nothing else imports it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch

from ..errors import MissingPackage, NotAvailable
from ..pt.device_traits import kind_named
from ..snapshot import MORE_STREAMS

STREAM = "xla"


@functools.cache
def start() -> torch.device:
    """The lazy device, ready for use beside the CPU."""
    # Otherwise a learning rate of exactly 0 or 1 is a constant of the graph, and another graph than every other one.
    os.environ.setdefault("XLA_NO_SPECIAL_SCALARS", "1")
    try:
        import torch_xla
    except ImportError as error:
        raise MissingPackage("torch_xla", needed_for="PJRT_DEVICE", install=kind_named("xla").install) from error
    join_processes()
    device = torch_xla.device()
    # autograd counts devices at the first backward of the process, and knows none that has not computed before.
    torch.ones(1, device=device).cpu()
    MORE_STREAMS[STREAM] = (random_state, set_random_state)
    set_random_state(torch.initial_seed())  # seeding before this did not reach this stream
    return device


def join_processes() -> None:
    """Tell the runtime which of the processes on this machine it is in; before its first operation, or not at all."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if here == 1:
        return
    import torch_xla._internal.pjrt as pjrt

    pjrt.initialize_multiprocess(int(os.environ.get("LOCAL_RANK") or 0), here)


def replicas() -> int:
    """Devices of all processes the runtime knows of."""
    import torch_xla.runtime as xr

    return int(xr.world_size())


def register_backend() -> None:
    """Tell torch.distributed of the backend `xla`."""
    import torch_xla.distributed.xla_backend  # noqa: F401


def sum_over_processes(tensors: list[torch.Tensor], scale: float) -> None:
    """Note that tensors are to be added up over all processes and scaled, in place."""
    import torch_xla.core.xla_model as xm

    xm.all_reduce(xm.REDUCE_SUM, tensors, scale=scale)


def use_spmd() -> int:
    """Let this process drive all devices as one; returns their number."""
    os.environ.setdefault("XLA_NO_SPECIAL_SCALARS", "1")
    import torch_xla.runtime as xr

    if not xr.is_spmd():
        if start.cache_info().currsize:
            raise NotAvailable(
                "this process has already used a single XLA device and cannot drive all of them; create the trainer "
                "with xla_spmd or tensor_parallel_size first"
            )
        xr.use_spmd()
    start()
    return int(xr.global_runtime_device_count())


def end_step() -> None:
    """Compute everything that was noted since the last call, in the background."""
    import torch_xla

    torch_xla.sync()


def wait() -> None:
    """Wait until everything that was handed to the device is computed."""
    import torch_xla.core.xla_model as xm

    xm.wait_device_ops()


def at_step_end(function: Callable[[], None]) -> None:
    """Call a function right after the current step is handed to the device: a step closure."""
    import torch_xla.core.xla_model as xm

    xm.add_step_closure(function)


def to_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors in host memory, in one transfer; those that are computed already compile nothing."""
    import torch_xla

    return list(torch_xla._XLAC._xla_get_cpu_tensors(tensors))


def random_state() -> int:
    """Where the device's random stream stands."""
    import torch_xla.core.xla_model as xm

    return int(xm.get_rng_state())


def set_random_state(state: int) -> None:
    import torch_xla.core.xla_model as xm

    xm.set_rng_state(state)


def identity(tensor: torch.Tensor) -> int:
    """The same number for tensors that are one on the device."""
    import torch_xla

    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))


def graphs() -> int:
    """Graphs compiled in this process so far."""
    from torch_xla.debug import metrics

    found = metrics.metric_data("CompileTime")
    return int(found[0]) if found else 0


def keep_compiled(folder: str) -> None:
    """Keep compiled graphs in a folder, where the device's compiler can read them back."""
    import torch_xla.runtime as xr

    xr.initialize_cache(folder)

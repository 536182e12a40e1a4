"""All calls of torch_xla: start, end of a step, random state, counters. No other module imports it."""

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
    """Initialize and return the lazy device."""
    # Otherwise a learning rate of exactly 0 or 1 becomes a constant, which needs a separate graph.
    os.environ.setdefault("XLA_NO_SPECIAL_SCALARS", "1")
    try:
        import torch_xla
    except ImportError as error:
        raise MissingPackage("torch_xla", needed_for="PJRT_DEVICE", install=kind_named("xla").install) from error
    join_processes()
    device = torch_xla.device()
    # autograd counts devices at the first backward of the process; a device must have computed something before.
    torch.ones(1, device=device).cpu()
    MORE_STREAMS[STREAM] = (random_state, set_random_state)
    set_random_state(torch.initial_seed())  # earlier seeding did not set this stream
    return device


def join_processes() -> None:
    """Set the local rank of the runtime; has an effect only before its first operation."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if here == 1:
        return
    import torch_xla._internal.pjrt as pjrt

    pjrt.initialize_multiprocess(int(os.environ.get("LOCAL_RANK") or 0), here)


def replicas() -> int:
    """Number of devices of all processes in the runtime."""
    import torch_xla.runtime as xr

    return int(xr.world_size())


def register_backend() -> None:
    """Register the backend `xla` with torch.distributed."""
    import torch_xla.distributed.xla_backend  # noqa: F401


def sum_over_processes(tensors: list[torch.Tensor], scale: float) -> None:
    """Record an in-place all-reduce and scaling of tensors."""
    import torch_xla.core.xla_model as xm

    xm.all_reduce(xm.REDUCE_SUM, tensors, scale=scale)


def use_spmd() -> int:
    """Make this process drive all devices (SPMD); returns their number."""
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
    """Run everything recorded since the last call, in the background."""
    import torch_xla

    torch_xla.sync()


def wait() -> None:
    """Wait until the device has finished."""
    import torch_xla.core.xla_model as xm

    xm.wait_device_ops()


def at_step_end(function: Callable[[], None]) -> None:
    """Call a function right after the current step is submitted to the device: a step closure."""
    import torch_xla.core.xla_model as xm

    xm.add_step_closure(function)


def to_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to host memory in one transfer; tensors that are already computed need no compilation."""
    import torch_xla

    return list(torch_xla._XLAC._xla_get_cpu_tensors(tensors))


def random_state() -> int:
    """The state of the device's random stream."""
    import torch_xla.core.xla_model as xm

    return int(xm.get_rng_state())


def set_random_state(state: int) -> None:
    import torch_xla.core.xla_model as xm

    xm.set_rng_state(state)


def identity(tensor: torch.Tensor) -> int:
    """An id of the device tensor; equal for tensors that share it."""
    import torch_xla

    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))


def graphs() -> int:
    """Graphs compiled in this process so far."""
    from torch_xla.debug import metrics

    found = metrics.metric_data("CompileTime")
    return int(found[0]) if found else 0


def metrics_report() -> str:
    """The counters of the runtime: compilations, executions and transfers, with their times."""
    from torch_xla.debug import metrics

    return str(metrics.metrics_report())


def keep_compiled(folder: str) -> None:
    """Store compiled graphs in a folder, if the device's compiler can load them."""
    import torch_xla.runtime as xr

    xr.initialize_cache(folder)

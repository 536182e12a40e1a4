"""Capturing CUDA graphs: streams, memory, errors, and what a failed capture leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BROKEN: list[Any] = []
"""Graphs whose capture failed; they are kept because torch's allocators may still access them."""


class CudaRecorder:
    """Captures CUDA graphs that share one memory pool: replays are sequential and never overlap.

    A captured function may be divided into several graphs, so that the host can launch one of them while another runs:
    launches of the same graph do not overlap.
    """

    _parts: list[Any] = []
    """The graphs of the capture in progress."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.take_new_memory()

    def take_new_memory(self) -> None:
        """Use a new memory pool for later captures."""
        self._pool = torch.cuda.graph_pool_handle()
        self._is_first = True

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        parts: list[Any] = []
        self._parts = parts
        generator = self._generator().clone_state()
        try:
            # This context restores the current stream: a failed capture does not leave its own.
            with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
                loss = self._capture(function)
        except BaseException:  # including Ctrl-C: an unfinished capture would break later work
            self._repair(generator)
            raise
        finally:
            self._parts = []

        def replay() -> None:
            for part in parts:
                part.replay()

        return replay, loss

    def divide(self) -> None:
        """End the graph that is being captured, if one is, and begin the next."""
        if self._parts:
            self._parts[-1].capture_end()
            self._begin_part()

    def _begin_part(self) -> None:
        self._parts.append(torch.cuda.CUDAGraph())
        # Other threads (loaders that pin memory, checkpoint writers) may call CUDA during the capture.
        self._parts[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _capture(self, function: Callable[[], Tensor]) -> Tensor:
        if self._is_first or self._is_short_of_memory():  # otherwise it would only cost time
            gc.collect()
            torch.cuda.empty_cache()
        torch.cuda.synchronize(self._device)
        _free_workspaces()
        collects, cause = gc.isenabled(), None
        gc.disable()  # no garbage collection of graphs or events during a capture
        try:
            with torch.cuda.stream(self._stream):
                self._begin_part()
                try:
                    loss = function()
                except Exception as error:  # kept, because ending the capture raises another error
                    cause = error
                    raise
                finally:
                    self._parts[-1].capture_end()
        except Exception as error:
            raise cause or error from None  # ending a failed capture fails too, without a useful message
        finally:
            _free_workspaces()
            if collects:
                gc.enable()
        self._is_first = False
        return loss

    def _is_short_of_memory(self) -> bool:
        """Whether less memory is free than torch keeps for later: it cannot return any during a capture."""
        kept: int = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return free < kept

    def _repair(self, generator: Any) -> None:
        """Restore the generator and the pool after a failed capture, which leaves both in an intermediate state."""
        BROKEN.extend(self._parts)
        self._generator().graphsafe_set_state(generator)
        try:
            torch._C._cuda_endAllocateToPool(self._index(), self._pool)
            torch._C._cuda_releasePool(self._index(), self._pool)
        except RuntimeError:
            pass  # the capture had ended normally

    def _index(self) -> int:
        index: int = torch.cuda.current_device() if self._device.index is None else self._device.index
        return index

    def _generator(self) -> Any:
        return torch.cuda.default_generators[self._index()]


def _free_workspaces() -> None:
    """Free the workspaces of cuBLAS, 32 MiB for each thread and stream, which torch would keep for the whole process.

    Before a capture, so that the graph has its own in its memory pool; after it, so that they are freed with the graph.
    """
    free = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if free is not None:
        free()

"""Which of torch's attention kernels are used while the shapes of micro-batches vary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

VARIED = "attention kernels for varying shapes"


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Use torch's own attention kernels instead of cuDNN's, which have to be prepared for every new shape.

    That takes about a tenth of a second for each shape, forward and backward: longer than computing most batches.
    """
    if not torch.cuda.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)

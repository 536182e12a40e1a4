"""Runs with PyTorch."""

from .frameworks import FRAMEWORKS
from .runs import Calls

_calls = Calls(FRAMEWORKS["torch"])
train, signalled, killed = _calls.train, _calls.signalled, _calls.killed


def warm_up() -> None:
    import torch._dynamo  # optimizers import it at their first step

    import loopwright.callbacks.defaults
    import loopwright.pt.trainer  # noqa: F401

    torch.set_num_threads(1)

"""Runs with TensorFlow."""

from .frameworks import FRAMEWORKS
from .runs import Calls

_calls = Calls(FRAMEWORKS["tensorflow"])
train, signalled, killed = _calls.train, _calls.signalled, _calls.killed


def warm_up() -> None:
    """Import only: a TensorFlow that has computed anything has threads, which a fork would lose."""
    import loopwright.callbacks.defaults
    import loopwright.tf.trainer  # noqa: F401

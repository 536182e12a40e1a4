"""One run with Keras on JAX in a process that cannot import TensorFlow, as where it is not installed."""

from __future__ import annotations

import sys
from typing import Any

from tests.keras_on_jax.run import main

HIDDEN = ("tensorflow", "tf_keras")


class Hiding:
    """A finder of modules that finds nothing of TensorFlow's: what imports it is told that it is not installed."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def find_spec(self, name: str, *where: Any) -> Any:
        return None if name.split(".")[0] in HIDDEN else self.finder.find_spec(name, *where)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def hidden_modules() -> set[str]:
    return {name for name in sys.modules if name.split(".")[0] in HIDDEN}


if __name__ == "__main__":
    assert "keras" not in sys.modules and not hidden_modules()
    sys.meta_path[:] = [Hiding(each) for each in sys.meta_path]
    main(*sys.argv[1:5])
    assert not hidden_modules()

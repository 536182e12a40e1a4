"""The compile cache in the user's cache folder, so that the next run of a model compiles little.

A file holds machine code and torch's serialized objects, so loading it can execute code. It is never in a run's folder
or a checkpoint, and it is read only if this user has signed it.
"""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn

from ...notices import logger
from ..user_cache import NotOurs, home, read_signed, write_signed

MOST_FILES = 64
"""Files that are kept, the latest ones."""


def cache_key(model: nn.Module, device: torch.device, *more: object) -> str:
    """Identifies what is compiled: the model's code, its weights' shapes, device, versions, and what else is given."""
    from ... import __version__

    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}-{platform.machine()}"
    versions = [_version_of(name) for name in ("transformers", "triton", "peft")]
    digest = hashlib.sha256(repr([kind, torch.__version__, __version__, platform.python_version(), versions]).encode())
    digest.update(repr([f"{type(each).__module__}.{type(each).__qualname__}" for each in model.modules()]).encode())
    digest.update(repr([(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()]).encode())
    digest.update(repr(more).encode())
    return digest.hexdigest()[:32]


@cache
def _version_of(package: str) -> str | None:
    """Of an installed package, whether it was imported or not: the key must not depend on when it is computed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def save_compile_cache(key: str) -> Path | None:
    """Write this process's compile cache under a key; returns the file, or None if nothing was written."""
    try:
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is None:
            return None
        path = cache_file(key)
        write_signed(path, key, artifacts[0], most=MOST_FILES)
        return path
    except Exception as error:  # a run must not fail because of its cache
        _tell(f"could not be saved: {type(error).__name__}: {error}")
    return None


def load_compile_cache(key: str) -> bool:
    """Load the compile cache of an earlier run; returns whether there was one."""
    path: Path | str = "the cache folder"
    try:
        path = cache_file(key)
        if not path.is_file():
            return False
        artifacts = read_signed(path, key)
        return torch.compiler.load_cache_artifacts(artifacts) is not None
    except NotOurs as reason:
        _tell(f"in {path} {reason}")
    except Exception as error:  # the code is compiled again
        _tell(f"in {path} could not be read: {type(error).__name__}: {error}")
    return False


def is_cached(key: str) -> bool:
    """Whether there is a cache under this key; it is checked when it is loaded."""
    try:
        return cache_file(key).is_file()
    except (OSError, RuntimeError):  # the user has no folder
        return False


def cache_file(key: str) -> Path:
    """The file of a key."""
    return home() / "compiled" / f"{key}.bin"


def _tell(text: str) -> None:
    # A warning even in strict mode: without the cache the run is the same, only slower to start.
    logger.warning(f"torch_compile: the compile cache {text}")

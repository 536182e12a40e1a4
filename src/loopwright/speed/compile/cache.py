"""The compile cache in the user's cache folder, so that the next run of a model compiles little.

A file holds machine code and torch's serialized objects, so loading it can execute code. It is never in a run's folder
or a checkpoint; it is read only if folder and file belong to this user and no other user can write to them, and if the
content was signed with a key that only this user can read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import secrets
import stat
import sys
from pathlib import Path

import torch
from torch import nn

from ...notices import logger

SIGNATURE = 32
MOST_FILES = 64
"""Files that are kept, the latest ones."""


def cache_key(model: nn.Module, device: torch.device, *more: object) -> str:
    """Identifies what is compiled: the model's code, its weights' shapes, device, versions, and what else is given."""
    from ... import __version__

    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}-{platform.machine()}"
    libraries = [sys.modules.get(name) for name in ("transformers", "triton", "peft")]
    versions = [f"{library.__name__} {library.__version__}" for library in libraries if library is not None]
    digest = hashlib.sha256(repr([kind, torch.__version__, __version__, platform.python_version(), versions]).encode())
    digest.update(repr([f"{type(each).__module__}.{type(each).__qualname__}" for each in model.modules()]).encode())
    digest.update(repr([(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()]).encode())
    digest.update(repr(more).encode())
    return digest.hexdigest()[:32]


def save_compile_cache(key: str) -> Path | None:
    """Write this process's compile cache under a key; returns the file, or None if nothing was written."""
    try:
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is None:
            return None
        path = cache_file(key)
        _make_private(path.parent)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(_signature(key, artifacts[0]) + artifacts[0])
        os.replace(partial, path)
        _remove_old(path.parent)
        return path
    except Exception as error:  # a run must not fail because of its cache
        _tell(f"could not be saved: {type(error).__name__}: {error}")
    return None


def load_compile_cache(key: str) -> bool:
    """Load the compile cache of an earlier run; returns whether there was one."""
    path = cache_file(key)
    try:
        if not path.is_file():
            return False
        foreign = next((each for each in (path.parent, path) if not _is_private(each)), None)
        if foreign is not None:
            _tell(f"in {path} is ignored: {foreign} belongs to, or can be changed by, another user; remove it")
            return False
        content = path.read_bytes()
        signature, artifacts = content[:SIGNATURE], content[SIGNATURE:]
        if not hmac.compare_digest(signature, _signature(key, artifacts)):
            _tell(f"in {path} was not written by this user (or is damaged) and is ignored; remove it")
            return False
        return torch.compiler.load_cache_artifacts(artifacts) is not None
    except Exception as error:  # the code is compiled again
        _tell(f"in {path} could not be read: {type(error).__name__}: {error}")
    return False


def is_cached(key: str) -> bool:
    """Whether there is a cache under this key; it is checked when it is loaded."""
    return cache_file(key).is_file()


def cache_file(key: str) -> Path:
    """The file of a key."""
    return home() / "compiled" / f"{key}.bin"


def key_file() -> Path:
    """The user's key."""
    return home() / "compile_cache.key"


def home() -> Path:
    """The folder of this library in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loopwright"


def _make_private(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_private(folder):
        raise PermissionError(f"{folder} belongs to, or can be changed by, another user; remove it")


def _is_private(path: Path) -> bool:
    """Whether a path belongs to this user and no other user can write to it."""
    if not hasattr(os, "getuid"):
        return True
    found = path.lstat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _remove_old(folder: Path) -> None:
    files = sorted(folder.glob("*.bin"), key=lambda each: each.stat().st_mtime)
    for path in files[:-MOST_FILES]:
        path.unlink(missing_ok=True)


def _signature(key: str, content: bytes) -> bytes:
    """Of the key as well: a file under the name of another is not valid."""
    return hmac.new(_key(), key.encode() + content, hashlib.sha256).digest()


def _key() -> bytes:
    path = key_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SIGNATURE))
    except FileExistsError:
        pass
    if not _is_private(path):
        raise PermissionError(f"{path} belongs to, or can be changed by, another user; remove it")
    key = path.read_bytes()
    if len(key) != SIGNATURE:
        raise ValueError(f"{path} is not a key: {len(key)} bytes instead of {SIGNATURE}; remove it")
    return key


def _tell(text: str) -> None:
    # A warning even in strict mode: without the cache the run is the same, only slower to start.
    logger.warning(f"torch_compile: the compile cache {text}")

"""The compile cache, saved with the run, so that a resumed run, also on another machine, recompiles little.

The file holds machine code and torch's serialized objects, so loading it can execute code. It is in the run's folder,
never in a checkpoint, and is signed with a key that only this user can read: files from other sources are not
loaded.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import re
import secrets
from pathlib import Path

import torch

from ...notices import logger

FOLDER = "compile_cache"
SIGNATURE = 32


def save_compile_cache(output_dir: str | None, device: torch.device) -> Path | None:
    """Write this process's compile cache to the run's folder; returns the file, or None if nothing was written."""
    if not _is_local(output_dir):
        return None
    try:
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is None:
            return None
        path = cache_file(output_dir, device)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_bytes(_signature(artifacts[0]) + artifacts[0])
        os.replace(partial, path)
        return path
    except Exception as error:  # a run must not fail because of its cache
        _tell(f"could not be saved with the run: {type(error).__name__}: {error}")
    return None


def load_compile_cache(output_dir: str | None, device: torch.device) -> bool:
    """Load the compile cache of an earlier start of this run; returns whether there was one."""
    if not _is_local(output_dir):
        return False
    path = cache_file(output_dir, device)
    try:
        if not path.is_file():
            return False
        content = path.read_bytes()
        signature, artifacts = content[:SIGNATURE], content[SIGNATURE:]
        if not hmac.compare_digest(signature, _signature(artifacts)):
            _tell(f"in {path} was not written by this user (or is damaged) and is ignored")
            return False
        return torch.compiler.load_cache_artifacts(artifacts) is not None
    except Exception as error:  # the code is compiled again
        _tell(f"in {path} could not be read: {type(error).__name__}: {error}")
    return False


def cache_file(output_dir: str | os.PathLike[str] | None, device: torch.device) -> Path:
    """The file of the cache, by torch version and device type."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}-{platform.machine()}"
    name = re.sub(r"[^\w.+-]+", "-", f"torch-{torch.__version__}-{kind}")
    return Path(output_dir or ".") / FOLDER / f"{name}.bin"


def key_file() -> Path:
    """The user's key, outside all runs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "loopwright" / "compile_cache.key"


def _signature(content: bytes) -> bytes:
    return hmac.new(_key(), content, hashlib.sha256).digest()


def _key() -> bytes:
    path = key_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SIGNATURE))
    except FileExistsError:
        pass
    key = path.read_bytes()
    if len(key) != SIGNATURE:
        raise ValueError(f"{path} is not a key: {len(key)} bytes instead of {SIGNATURE}; remove it")
    return key


def _is_local(output_dir: str | None) -> bool:
    return bool(output_dir) and "://" not in str(output_dir)


def _tell(text: str) -> None:
    # A warning even in strict mode: without the cache the run is the same, only slower to start.
    logger.warning(f"torch_compile: the compile cache {text}")

"""The compile cache, saved with the run: a resumed run, on another machine too, recompiles little.

The file holds machine code and torch's own serialized objects, so reading one is running it. It lies in the run's
folder and never in a checkpoint, and is signed with a key that only this user can read: a file that came from elsewhere
is not read.
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
    """Write what this process compiled into the run's folder; returns the file, or None when there is nothing."""
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
    except Exception as error:  # a cache is never worth a run
        _tell(f"could not be saved with the run: {type(error).__name__}: {error}")
    return None


def load_compile_cache(output_dir: str | None, device: torch.device) -> bool:
    """Give torch what an earlier start of this run compiled; returns whether there was something."""
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
    except Exception as error:  # it is compiled again
        _tell(f"in {path} could not be read: {type(error).__name__}: {error}")
    return False


def cache_file(output_dir: str | os.PathLike[str] | None, device: torch.device) -> Path:
    """Where it lies: one file for each torch and each kind of device."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}-{platform.machine()}"
    name = re.sub(r"[^\w.+-]+", "-", f"torch-{torch.__version__}-{kind}")
    return Path(output_dir or ".") / FOLDER / f"{name}.bin"


def key_file() -> Path:
    """The user's key, outside every run."""
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
    # Said and nothing more, strict or not: without the cache the run is the same, only later.
    logger.warning(f"torch_compile: the compile cache {text}")

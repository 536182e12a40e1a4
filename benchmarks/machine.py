"""Date, machine and versions, to be kept with every measured number."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "accelerate", "lightning", "numpy", "loopwright")


def described() -> dict[str, Any]:
    """What a reader needs to judge a measurement."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "gpu": gpu},
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

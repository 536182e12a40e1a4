"""`loopwright env`: versions and devices of this installation, as plain text for a bug report."""

from __future__ import annotations

import argparse
import os
import platform
from importlib.metadata import PackageNotFoundError, version

from ... import __version__
from ..json_output import add_json, show

REQUIRED = ("torch", "numpy", "safetensors", "pyyaml", "rich")
OPTIONAL = ("transformers", "datasets", "peft", "accelerate", "tensorboard", "lightning")


def run(words: list[str]) -> int:
    """Print versions and devices."""
    description = "Show versions and devices for a bug report. No names, paths or settings are shown."
    parser = argparse.ArgumentParser("loopwright env", description=description)
    add_json(parser)
    options = parser.parse_args(words)
    rows = [*machine(), *packages(), *devices()]
    width = max(len(name) for name, _ in rows)
    show(options, dict(rows), "\n".join(f"{name:<{width}}  {value}" for name, value in rows))
    return 0


def machine() -> list[tuple[str, str]]:
    return [
        ("loopwright", __version__),
        ("python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("processors", str(os.cpu_count())),
    ]


def packages() -> list[tuple[str, str]]:
    return [(name, _version(name)) for name in (*REQUIRED, *OPTIONAL)]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed" if package in OPTIONAL else "NOT INSTALLED, but required"


def devices() -> list[tuple[str, str]]:
    try:
        import torch
    except ImportError as error:
        return [("devices", f"unknown, torch cannot be imported: {error}")]
    if not torch.accelerator.is_available():
        return [("devices", "cpu only")]
    kind = torch.accelerator.current_accelerator()
    module = torch.get_device_module(kind)
    name_of = getattr(module, "get_device_name", lambda index: "")
    found = [(f"{kind}:{index}", name_of(index)) for index in range(torch.accelerator.device_count())]
    toolkits = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    return found + [(name, number) for name, number in toolkits.items() if number]

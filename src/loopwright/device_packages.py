"""Packages that bring kinds of devices: each registers what is known about its own when it is imported.

Nothing below such a package names it, and none is imported before a device of its kind is in use.
"""

from __future__ import annotations

from importlib import import_module

PACKAGES: dict[str, str] = {"xla": "xla", "tpu": "xla", "neuron": "neuron"}
"""Type of a torch device -> the package of loopwright that knows it."""


def import_device_package(kind: str) -> None:
    """Import the package that knows this type of device, if there is one."""
    if kind in PACKAGES:
        import_module(f".{PACKAGES[kind]}", __package__)

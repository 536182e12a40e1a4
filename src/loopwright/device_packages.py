"""Packages that support device types: each registers the traits of its devices when it is imported.

Lower packages do not import them, and each is imported only when a device of its type is in use.
"""

from __future__ import annotations

from importlib import import_module

PACKAGES: dict[str, str] = {"xla": "xla", "tpu": "xla", "neuron": "neuron"}
"""Type of a torch device -> the package of loopwright that supports it."""


def import_device_package(kind: str) -> None:
    """Import the package that supports this device type, if there is one."""
    if kind in PACKAGES:
        import_module(f".{PACKAGES[kind]}", __package__)

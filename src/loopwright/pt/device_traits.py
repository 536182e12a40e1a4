"""Traits of device types, registered by type; all others are queried from the device itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..device_packages import PACKAGES, import_device_package

if TYPE_CHECKING:
    import torch


class LazyRuntime(Protocol):
    """The runtime of a device that executes operations lazily."""

    def start(self) -> torch.device: ...
    def wait(self) -> None: ...
    def identity(self, tensor: torch.Tensor) -> int: ...


class RecompileGuard(Protocol):
    """Counts the graphs a device compiles, and warns when there are too many."""

    tell: Callable[[str], None] | None

    @property
    def graphs(self) -> int: ...
    def count(self) -> int: ...


@dataclass(frozen=True)
class Kind:
    """Traits of a device type."""

    static_shapes: bool = False
    """Whether each new shape costs a compilation."""
    compile_backend: str | None = None
    """Its backend for torch.compile."""
    strategy: Callable[..., Any] | None = None
    """Creates its strategy, if it needs a special one."""
    processes: Callable[..., Any] | None = None
    """The same for several ranks with such devices; None to use torch's process groups."""
    runtime: Callable[[], Any] | None = None
    """Returns its `LazyRuntime`, if it is a lazy device."""
    metrics: Callable[[], str] | None = None
    """Returns the report of its runtime on compilations and transfers."""
    install: str = ""
    """The vendor's install command."""


KINDS: dict[str, Kind] = {}
"""The registered traits, by type of torch device."""


def register(device_type: str, kind: Kind) -> None:
    """Register a device type; packages that support one do this when they are imported."""
    KINDS[device_type] = kind


def kind_of(device: torch.device) -> Kind:
    """The traits of a device; defaults for most."""
    return kind_named(device.type)


def kind_named(device_type: str) -> Kind:
    """The traits of a device type."""
    if device_type not in KINDS:
        import_device_package(device_type)
    return KINDS.get(device_type, Kind())


def known_kinds() -> dict[str, Kind]:
    """The traits of all device types that have special ones."""
    return {**KINDS, **{device_type: kind_named(device_type) for device_type in PACKAGES}}

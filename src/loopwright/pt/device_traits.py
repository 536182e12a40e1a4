"""What is known beforehand about kinds of devices, by the type of the live device; everything else is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..device_packages import PACKAGES, import_device_package

if TYPE_CHECKING:
    import torch


class LazyRuntime(Protocol):
    """What computes on a device whose operations are only noted."""

    def start(self) -> torch.device: ...
    def wait(self) -> None: ...
    def identity(self, tensor: torch.Tensor) -> int: ...


class RecompileGuard(Protocol):
    """Counts the graphs a device compiles, and says when there are too many."""

    tell: Callable[[str], None] | None

    @property
    def graphs(self) -> int: ...
    def count(self) -> int: ...


@dataclass(frozen=True)
class Kind:
    """How a kind of device wants to be used."""

    static_shapes: bool = False
    """Whether each new shape costs a compilation."""
    compile_backend: str | None = None
    """The backend of torch.compile that belongs to it."""
    strategy: Callable[..., Any] | None = None
    """Makes the strategy that carries out updates on it, if that is a special one."""
    processes: Callable[..., Any] | None = None
    """The same, for several processes that each have such a device; None where torch's own ones are used."""
    runtime: Callable[[], Any] | None = None
    """Imports its `LazyRuntime`, if it is a lazy device."""
    install: str = ""
    """What its vendor says to run."""


KINDS: dict[str, Kind] = {}
"""The kinds that were registered so far, by the type of their torch devices."""


def register(device_type: str, kind: Kind) -> None:
    """Make a kind of device known; packages that bring one do this when they are imported."""
    KINDS[device_type] = kind


def kind_of(device: torch.device) -> Kind:
    """What is known about the device's kind; nothing special for most."""
    return kind_named(device.type)


def kind_named(device_type: str) -> Kind:
    """What is known about devices of this type."""
    if device_type not in KINDS:
        import_device_package(device_type)
    return KINDS.get(device_type, Kind())


def known_kinds() -> dict[str, Kind]:
    """Every kind something special is known about."""
    return {**KINDS, **{device_type: kind_named(device_type) for device_type in PACKAGES}}

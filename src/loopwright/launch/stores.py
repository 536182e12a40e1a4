"""The stores of a rendezvous: where they listen.

torch's servers listen on all interfaces. Here they listen on the address that other processes connect to.
On one node the agent's own store is in memory: the agent unpickles what it reads there, and no other process can write
to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d, static_tcp_rendezvous as static
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from . import network
from .torchrun import Way


@contextmanager
def listening(way: Way) -> Iterator[None]:
    """While entered, the servers of torchrun's agent listen as described above."""

    def make_store(host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *args: Any,
                   **options: Any) -> TCPStore:  # fmt: skip
        if not is_master:
            return TCPStore(host_name, port, world_size, False, *args, **options)
        return serve(network.address_to_bind(host_name, way.is_alone), port, world_size, *args, **options)

    def make_shared(self: DynamicRendezvousHandler, master_addr: str, master_port: int) -> TCPStore:
        return make_store(master_addr, master_port, is_master=True)

    handler = DynamicRendezvousHandler
    originals = c10d.TCPStore, static.TCPStore, c10d._create_tcp_store, handler._create_tcp_store_server
    c10d.TCPStore = static.TCPStore = make_store  # type: ignore[misc, assignment]
    handler._create_tcp_store_server = make_shared  # type: ignore[method-assign]
    if way.is_alone and not way.has_port:
        c10d._create_tcp_store = lambda params: HashStore()  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        c10d.TCPStore, static.TCPStore, c10d._create_tcp_store = originals[:3]  # type: ignore[misc]
        handler._create_tcp_store_server = originals[3]  # type: ignore[method-assign]


def serve(address: str | None, port: int, world_size: int | None = None, *args: Any, **options: Any) -> TCPStore:
    """A store that listens on this address, or on all interfaces if it is None."""
    if address is None:
        return TCPStore("localhost", port, world_size, True, *args, **options)
    options.pop("multi_tenant", None)  # it would reuse a server of this process
    listener = network.listener(address, port)
    port = listener.getsockname()[1]
    return TCPStore(address, port, world_size, True, *args, master_listen_fd=listener.detach(), **options)

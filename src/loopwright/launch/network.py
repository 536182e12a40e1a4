"""Addresses and network interfaces through which other nodes reach this one."""

from __future__ import annotations

import fcntl
import socket
import struct

from ..errors import ArgumentsError

PORT = 29400
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def endpoint(text: str) -> tuple[str, int]:
    """Host and port of `host`, `host:port`, `[v6]:port`."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.endswith("]")):  # no port, or a bare v6 address
        return text.strip("[]"), PORT
    if not port.isdigit():
        raise ArgumentsError(f"{text!r}: {port!r} is not a port number; use host:port such as node1:{PORT}")
    return host.strip("[]"), int(port)


def is_here(host: str) -> bool:
    """Whether the address belongs to this machine, so that a server can listen on it."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ArgumentsError(f"the host {host!r} cannot be resolved ({error}); use an IP address") from error
    return any(_can_listen(str(address)) for address in addresses)


def _can_listen(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def is_taken(host: str, port: int) -> bool:
    """Whether the port is in use."""
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def address_towards(host: str, port: int) -> str | None:
    """The address of this machine on the route to `host`; None without a route."""
    try:
        family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # connecting a datagram socket sends nothing; it only selects the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The name of the interface that has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asker.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None

"""Addresses and network interfaces through which other nodes reach this one."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from ..errors import ArgumentsError

PORT = 29400
HOME = "127.0.0.1"
WAITING = 2048
"""Connections that may wait to be accepted."""
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


def address_to_bind(host: str, is_alone: bool) -> str | None:
    """The address of this machine that the other processes reach as `host`; None if that is not certain.

    /etc/hosts may map the name of a machine to a loopback address, which other nodes do not see.
    """
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return None
    here = [address for address in found if _can_listen(address)]
    certain = is_alone or host in here or (len({*found}) == 1 and not _is_loopback(found[0]))
    return sorted(here, key=lambda address: not _is_loopback(address))[0] if here and certain else None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listener(address: str, port: int) -> socket.socket:
    """A socket that listens on one address of this machine."""
    opened = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((address, port))
        opened.listen(WAITING)
    except OSError as error:
        opened.close()
        # The class of torch's own error, which torchrun handles.
        raise RuntimeError(f"cannot listen on {address} port {port}: {error.strerror}; use another port") from error
    return opened


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


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            answer = fcntl.ioctl(asker.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interfaces() -> list[str]:
    """The names of this machine's interfaces."""
    return [name for _, name in socket.if_nameindex()]


def interface_of(address: str) -> str | None:
    """The name of the interface that has this IPv4 address."""
    return next((name for name in interfaces() if address_of(name) == address), None)

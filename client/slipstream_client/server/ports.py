"""TCP ports on this machine: find free ones, and say plainly who holds one that is taken."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

import psutil

from slipstream_client.errors import SlipstreamError

_LOWEST_PORT = 10_000
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_FIRST_EPHEMERAL_PORT = 32_768


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports that nobody listens on at `host` now.

    They lie below the range from which the kernel serves outgoing connections. Otherwise a client that polls a port
    until its server listens could be given that very port for its own end, and the server would find it taken.
    """
    ports = range(_LOWEST_PORT, _first_ephemeral_port())
    free: list[int] = []
    for port in random.SystemRandom().sample(ports, len(ports)):
        if len(free) == count:
            break
        if is_free(port, host):
            free.append(port)
    if len(free) < count:
        raise SlipstreamError(f"there are no {count} free ports on {host}")
    return free


def require_free(port: int, host: str, flag: str) -> None:
    """Raise SlipstreamError, naming the holder and the `flag` that picks another port, if `port` is taken at `host`."""
    error = _obstacle(port, host)
    if error is None:
        return
    if error.errno != errno.EADDRINUSE:
        raise SlipstreamError(f"cannot listen on {host}, port {port}: {error.strerror or error}")
    holder = holder_of(port)
    by = f" by {holder}" if holder else ""
    raise SlipstreamError(f"port {port} on {host} is already taken{by}; choose another with {flag}")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on `port` now; a port in TIME_WAIT counts as free, as it does for the server.

    Raises:
        SlipstreamError: nobody can listen at this host.
    """
    error = _obstacle(port, host)
    if error is not None and error.errno not in (errno.EADDRINUSE, errno.EACCES):
        raise SlipstreamError(f"cannot listen on {host}: {error.strerror or error}")
    return error is None


def _obstacle(port: int, host: str) -> OSError | None:
    """What keeps a server from listening there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None


def _first_ephemeral_port() -> int:
    try:
        first = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_FIRST_EPHEMERAL_PORT
    # Where the kernel uses nearly all ports, nothing is gained by staying below.
    return first if first > _LOWEST_PORT + 1000 else _USUAL_FIRST_EPHEMERAL_PORT


def holder_of(port: int) -> str | None:
    """Name and process id of whoever listens on `port`; None where the system does not tell."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    except psutil.Error:
        return None
    return None

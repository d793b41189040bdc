"""TCP ports to serve on, and the errors of servers."""

from __future__ import annotations

import contextlib
import socket

from slime_plugin.errors import MemoryWalkerError


class ServerError(MemoryWalkerError):
    """A server cannot be started, did not become healthy, or has exited."""


def hold(host: str, port: int | None = None) -> socket.socket:
    """Return a socket that keeps a port, a free one without ``port``, for a server that will listen on it.

    Until it is closed nothing else on this machine is given that port, as a listener or for a connection. Only a server
    that sets SO_REUSEADDR, as all do, can listen on it.
    """
    try:
        return bind(host, port or 0)
    except OSError as error:
        if port is None:
            what, remedy = f"nothing can be served on {host}", "choose an address of this machine"
        else:
            what = f"port {port} on {host} cannot be used"
            remedy = "choose another one, or none to get a free one"
        raise ServerError(f"{what}: {error.strerror}; {remedy}") from error


def check_free(host: str, port: int) -> None:
    """Raise :class:`ServerError` if nothing can be served there."""
    hold(host, port).close()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nothing listens on at this moment."""
    with hold(host) as holder:
        return port_of(holder)


def port_of(bound: socket.socket) -> int:
    number: int = bound.getsockname()[1]
    return number


def http_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound to an address and does not listen yet. Raises :class:`OSError`."""
    # Its protocol is TCP, not 0: asyncio sets TCP_NODELAY only then, and without it every answer takes 40 ms longer.
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family, kind, protocol))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports of stopped servers in TIME_WAIT are free
        listener.bind(address)
        stack.pop_all()
    return listener

"""Network namespaces joined by veths, for tests that need real interfaces; never one of the machine's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from pyroute2 import IPRoute

from tailbound_lab.lab import enter, namespaces, owner


def _index(ip: IPRoute, name: str) -> int:
    return int(ip.link_lookup(ifname=name)[0])


def _veth(name: str, peer: str, namespace: str) -> None:
    with IPRoute() as ip:
        ip.link("add", ifname=name, kind="veth", peer={"ifname": peer, "net_ns_fd": namespace})


def _up(name: str, address: str | None) -> None:
    with IPRoute() as ip:
        if address is not None:
            ip.addr("add", index=_index(ip, name), address=address, prefixlen=24)
        ip.link("set", index=_index(ip, name), state="up")


def delete(name: str) -> None:
    """Removes an interface of the present namespace, and its peer with it."""
    with IPRoute() as ip:
        ip.link("del", index=_index(ip, name))


@contextlib.contextmanager
def _back() -> Iterator[None]:
    """This thread is in its own namespace again at the end."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        yield
    finally:
        enter.enter_network(f"/proc/self/fd/{home}")
        os.close(home)


@contextlib.contextmanager
def _made(count: int) -> Iterator[list[str]]:
    """Fresh namespaces; this thread is back in its own, and they are gone, at the end."""
    prefix = owner.new_prefix()  # so that whoever makes a lab next removes what a killed test run left
    with contextlib.ExitStack() as made:
        for i in range(count):
            namespaces.create(f"{prefix}-w{i}")
            made.callback(namespaces.remove, f"{prefix}-w{i}")
        made.enter_context(_back())
        yield [f"{prefix}-w{i}" for i in range(count)]


def go(name: str) -> None:
    """Moves this thread into a namespace."""
    enter.enter_network(str(namespaces.path(name)))


@contextlib.contextmanager
def visit(name: str) -> Iterator[None]:
    """This thread is in a namespace, and in its own again at the end, wherever it has gone meanwhile."""
    with _back():
        go(name)
        yield


@contextlib.contextmanager
def pair(interface: str, addresses: tuple[str, str]) -> Iterator[list[str]]:
    """Two namespaces with a veth of the same name in each; yields their names."""
    with _made(2) as names:
        namespaces.call(names[0], _veth, interface, interface, names[1])
        for name, address in zip(names, addresses, strict=True):
            namespaces.call(name, _up, interface, address)
        namespaces.call(names[0], _up, "lo", None)
        yield names


def _quiet() -> None:
    """No IPv6 that speaks by itself; loopback up."""
    for key in ("all", "default"):
        namespaces.write_sysctl(f"net/ipv6/conf/{key}/disable_ipv6", 1)
    _up("lo", None)


@contextlib.contextmanager
def star(count: int) -> Iterator[tuple[str, list[str]]]:
    """A namespace with ``port0``, ``port1``, ... and one with ``data0`` at the other end of each; no addresses."""
    with _made(count + 1) as names:
        hub, *ends = names
        for name in names:
            namespaces.call(name, _quiet)
        for port, end in enumerate(ends):
            namespaces.call(hub, _veth, f"port{port}", "data0", end)
            namespaces.call(hub, _up, f"port{port}", None)
            namespaces.call(end, _up, "data0", None)
        yield hub, ends

"""What the tests in namespaces share: sockets inside a lab, and a check that nothing is left behind."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

import warm_start as warm
from left_behind import nothing_left_behind as nothing_left_behind
from tailbound.wire.address import family_of
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.topology import Link


@pytest.fixture
def datagram_socket() -> Iterator[Callable[..., socket.socket]]:
    """``(lab, rank, link, port=0)`` -> a UDP socket of that worker, bound to its address."""
    sockets: list[socket.socket] = []

    def make(lab: Cluster, rank: int, link: Link = Link.DATA, port: int = 0) -> socket.socket:
        def inside() -> socket.socket:
            address = lab.workers[rank].address_on(link)
            made = socket.socket(family_of(address), socket.SOCK_DGRAM)
            made.settimeout(20.0)  # long enough for a loaded machine; only a failing test ever waits for it
            made.bind((address, port))
            return made

        sockets.append(lab.run(rank, inside))
        return sockets[-1]

    yield make
    for each in sockets:
        each.close()


@pytest.fixture(scope="session")
def warm_server() -> Iterator[warm.Server]:
    """One for all tests."""
    server = warm.Server()
    yield server
    server.close()


@pytest.fixture(scope="session", autouse=True)
def _loading_meanwhile(request: pytest.FixtureRequest) -> None:
    """Where tests will want it, the server loads beside the first of them."""
    if any("warm_server" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("warm_server").start()


@pytest.fixture
def warm_start(warm_server: warm.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in labs need not import PyTorch and Tailbound again, and neither does what compiles; ``warm_start``."""
    forking = SimpleNamespace(**vars(subprocess) | {"Popen": warm.popen_from(warm_server)})
    for module in ("tailbound_lab.lab.cluster", "tailbound.prepare"):
        monkeypatch.setattr(f"{module}.subprocess", forking)

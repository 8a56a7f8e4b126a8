"""The proof that all ranks hear each other, over cables that take nothing, little or only small packets.

Over udp it is the same: ``unit/test_hello.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from support import MS, MemoryStore, patient
from tailbound.collective.communicator import Communicator
from tailbound.errors import TransportError
from tailbound.transport.config import Config
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.faults import Fault, Way
from tailbound_lab.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

Make = Callable[..., Cluster]
#: As good as all: probabilities of the lab are below one.
ALL = Fault(loss=1 - 1e-9)


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not heard is tried for 1.5 s instead of 10 s; eight times, and no one is lost by chance here."""
    monkeypatch.setattr("tailbound.collective.hello.LIMIT", 1_500 * MS)


def refusals(lab: Cluster) -> list[str]:
    """What the communicators of all ranks say, of which none comes about."""
    store, ranks = MemoryStore(), len(lab.workers)

    def join(rank: int) -> str:
        config = Config(**patient(width=0, rank=rank, ranks=ranks, port=lab.spec.port))
        interface = lab.workers[rank].interface
        with pytest.raises(TransportError) as error:
            Communicator(store, config, datapath="xdp", interface=interface).close()
        return str(error.value)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(lambda rank: lab.run(rank, join, rank, sysfs=True), range(ranks)))


def test_a_cable_that_takes_nothing_in_one_direction(tailbound_lab: Make, briefly: None) -> None:
    lab = tailbound_lab(workers=3, cables=True)
    # packets to be resolved (ARP) are no IPv4 and pass
    lab.set_faults(ALL, 1, Link.DATA, Way.TO_WORKER)
    for said in refusals(lab):
        assert re.search(r"rank 1 does not hear ranks 0, 2: .* UDP port 5515 of 198\.18\.0\.2; let it in", said)
        assert said.count("does not hear") == 1


def test_a_path_that_takes_small_packets_only(tailbound_lab: Make, briefly: None) -> None:
    lab = tailbound_lab(workers=2)

    def narrow() -> None:
        from pyroute2 import IPRoute

        with IPRoute() as route:
            route.link("set", index=route.link_lookup(ifname=Link.DATA.port(1))[0], mtu=1000)

    namespaces.call(lab.topology.switch, narrow)
    for said in refusals(lab):
        assert "does not hear" not in said
        assert re.search(r"hears rank \d, but no packets of 1500 bytes .* MTU", said)

"""Teams of communicators in namespaces whose rows a P4 switch in bmv2 averages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyroute2 import IPRoute

import switch_cases
import veths
from p4_world import SIZES
from support import Team, team
from tailbound.kernel import ethtool
from tailbound.switch.box import Box
from tailbound.switch.job import JobSpec, RankSpec
from tailbound.switch.p4.switch import P4Switch, open_p4
from tailbound.transport.config import parse_switch
from tailbound_lab.lab import namespaces

COOKIE = 0x0B0E0B0E


def _worker(rank: int) -> None:
    """Address and MAC of a rank; its stack makes whole frames, since bmv2 takes them as they are."""
    with IPRoute() as ip:
        index = ip.link_lookup(ifname="data0")[0]
        ip.link("set", index=index, address=switch_cases.mac_of(rank))
        ip.addr("add", index=index, address=switch_cases.ip_of(rank), prefixlen=16)
    ethtool.whole_frames("data0")


@contextmanager
def p4_team(
    ranks: int, settings: dict[str, Any], *, datapath: str, rows: int = 512
) -> Iterator[tuple[Team, Box[P4Switch]]]:
    """A job of ``ranks`` and its switch; workers find each other and the switch by ARP."""
    with veths.star(ranks) as (hub, ends):
        ports = [f"port{rank}" for rank in range(ranks)]
        for rank, end in enumerate(ends):
            namespaces.call(end, _worker, rank)
        stations = {switch_cases.mac_of(rank): port for rank, port in enumerate(ports)}
        given = {"mac": switch_cases.MAC, "stations": stations, "sizes": SIZES}
        box = namespaces.call(hub, lambda: open_p4(ports, switch_cases.ADDRESS, **given))
        try:
            there = (RankSpec(switch_cases.ip_of(r), switch_cases.mac_of(r), port) for r, port in enumerate(ports))
            entry = box.add(JobSpec(tuple(there), COOKIE, rows=rows))
            at = {"port": entry.port, "switch": parse_switch(box.environment(entry)["TAILBOUND_SWITCH"])}
            with team(
                ranks, settings | at, datapath=datapath, interface="data0", cookie=COOKIE,
                within=lambda rank, make: namespaces.call(ends[rank], make, sysfs=True),
            ) as whole:  # fmt: skip
                yield whole, box
        finally:
            box.close()

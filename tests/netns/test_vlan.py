"""A job on a VLAN, over real interfaces: attached by its name, the program is on the device below (kernel-1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pyroute2 import IPRoute

import veths
from lab_team import told_by
from support import MemoryStore, assembled
from tailbound.collective.communicator import Communicator
from tailbound.doctor import facts
from tailbound.doctor.interfaces import interface
from tailbound.doctor.verdict import choose
from tailbound.kernel import ethtool
from tailbound.transport.config import Config
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster

pytestmark = pytest.mark.needs("root", "netns")


# One process does it all, since its mount namespace takes the pins with it whatever happens.
STORY = """
import json, os
from pyroute2 import IPRoute
from tailbound import cli
from tailbound.doctor import interfaces as facts
from tailbound.errors import AttachError
from tailbound.kernel import net, pin

def make(number):
    with IPRoute() as route:
        (device,) = route.link_lookup(ifname="data0")
        route.link("add", ifname=f"data0.{number}", kind="vlan", link=device, vlan_id=number)
        (index,) = route.link_lookup(ifname=f"data0.{number}")
        route.addr("add", index=index, address=f"198.18.{number}.1", prefixlen=24)
        route.link("set", index=index, state="up")

def remove(name):
    with IPRoute() as route:
        route.link("del", index=route.link_lookup(ifname=name)[0])

def set_mtu(name, mtu):
    with IPRoute() as route:
        route.link("set", index=route.link_lookup(ifname=name)[0], mtu=mtu)

def attach(name, *more):
    return cli.main(["attach", name, "--ring", "1", *more])

make(5), make(6)
told = {"attach": attach("data0.5")}
told["on"] = [net.xdp_on(name) is not None for name in ("data0", "data0.5")]
told["vlan"] = pin.settings("data0.5").vlan
told["others"] = [attach(name) for name in ("data0.5", "data0", "data0.6")]
set_mtu("data0.5", 1400)
seen = facts.interface("data0.5")
set_mtu("data0.5", 1500)
told["doctor"] = [seen.device, seen.driver, seen.vlan_stripping, seen.xdp_name, seen.linear]
told["mtu"] = [seen.mtu, seen.device_mtu]
told["replace"] = attach("data0.5", "--port", "7412", "--replace"), pin.settings("data0.5").port
told["detach"] = cli.main(["detach", "data0.5"]), net.xdp_on("data0") is None
told["attach6"] = attach("data0.6")
told["owner"] = facts.interface("data0.5").xdp_owner, facts.interface("data0").xdp_owner
remove("data0.6"), make(6)
try:
    pin.settings("data0.6")
except AttachError as error:
    told["again"] = "removed and made again" in str(error)
told["anew"] = attach("data0.6", "--replace"), pin.settings("data0.6").vlan
with IPRoute() as route:
    (index,) = route.link_lookup(ifname="data0.6")
    route.link("set", index=index, state="down")
    route.link("set", index=index, ifname="other")
told["renamed"] = len(pin.sweep()), net.xdp_on("data0") is None
remove("other")
told["removed"] = cli.main(["detach", "data0.6"]), net.xdp_on("data0") is None
print(json.dumps(told))
"""


@pytest.mark.needs("bpf", "8021q")
@pytest.mark.usefixtures("warm_start")
def test_attached_by_the_name_of_its_interface(tailbound_lab: Callable[..., Cluster]) -> None:
    """The program is on the device, a second one there is refused, and a vanished interface is detached by name."""
    lab = tailbound_lab(workers=1)
    told, _, _ = told_by(lab, STORY)
    assert told == {
        "attach": 0,
        "on": [True, False],
        "vlan": 5,
        "others": [1, 1, 1],
        "doctor": ["data0", "veth", False, "tb_worker", 3516],
        "mtu": [1400, 1500],
        "replace": [0, 7412],
        "detach": [0, True],
        "attach6": 0,
        "owner": ["data0.6", "data0.6"],
        "again": True,
        "anew": [0, 6],
        "renamed": [0, False],
        "removed": [0, True],
    }


def _vlan(address: str, inside: bool) -> None:
    with IPRoute() as route:
        (device,) = route.link_lookup(ifname="tbx")
        if inside:
            ethtool.set_features("tbx", False, "tx-vlan-hw-insert")
        route.link("add", ifname="tbx.5", kind="vlan", link=device, vlan_id=5)
        (index,) = route.link_lookup(ifname="tbx.5")
        route.addr("add", index=index, address=address, prefixlen=24)
        route.link("set", index=index, state="up")


@pytest.mark.needs("bpf", "8021q")
@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize("inside", [True, False], ids=["tags in frames", "tags beside frames"])
def test_a_job_averages(inside: bool) -> None:
    """Rows, results and words of two ranks go through."""
    store, addresses = MemoryStore(), ("198.18.5.1", "198.18.5.2")
    with veths.pair("tbx", ("198.18.4.1", "198.18.4.2")) as names:

        def maker(rank: int) -> Callable[[], Communicator]:
            def make() -> Communicator:
                config = Config(rank=rank, ranks=2, ring_mib=8.0, deadline_1=10**9, deadline_2=10**9)
                return Communicator(store, config, datapath="xdp", interface="tbx.5", name="job")

            namespaces.call(names[rank], _vlan, addresses[rank], inside)
            return lambda: namespaces.call(names[rank], make, sysfs=True)

        with assembled([maker(0), maker(1)]) as team:
            for op in range(3):
                inputs = [np.full(200_000, 1.0 + rank + op, np.float32) for rank in range(2)]
                (first, outcome), (second, _) = team.allreduce(inputs)
                assert outcome.delivered == outcome.expected > 0
                np.testing.assert_allclose(first, 1.5 + op, atol=0.05)
                np.testing.assert_array_equal(first, second)
            assert [job.datapath for job in team.communicators] == ["xdp", "xdp"]


# -- what ``doctor`` reads from a real interface: tags of VLANs that its driver strips ---------------------------------


def test_stripped_tags_are_noted() -> None:
    with veths.pair("tbx", ("10.77.0.1", "10.77.0.2")) as (place, _):
        for on in (True, False):
            namespaces.call(place, ethtool.set_features, "tbx", on, ethtool.RXVLAN)
            link = namespaces.call(place, interface, "tbx")
            assert link.vlan_stripping is on
            assert (link.rx_queues, link.tx_queues) == (1, 1)
            assert any("ethtool -K tbx rxvlan off" in note for note in choose(facts.machine(), link).notes) is on

"""What ``doctor`` reads from a real interface: tags of VLANs that its driver strips."""

from __future__ import annotations

import pytest

import veths
from tailbound.doctor import facts
from tailbound.doctor.interfaces import interface
from tailbound.doctor.verdict import choose
from tailbound.kernel import ethtool
from tailbound_lab.lab import namespaces

pytestmark = pytest.mark.needs("root", "netns")


def test_stripped_tags_are_noted() -> None:
    with veths.pair("tbx", ("10.77.0.1", "10.77.0.2")) as (place, _):
        for on in (True, False):
            namespaces.call(place, ethtool.set_features, "tbx", on, ethtool.RXVLAN)
            link = namespaces.call(place, interface, "tbx")
            assert link.vlan_stripping is on
            assert (link.rx_queues, link.tx_queues) == (1, 1)
            assert any("ethtool -K tbx rxvlan off" in note for note in choose(facts.machine(), link).notes) is on

"""What ``doctor`` reads from a real interface: queues, stripped tags of VLANs, and how much of a frame is one piece."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import veths
from left_behind import nothing_more
from tailbound.doctor import facts
from tailbound.doctor.interfaces import Interface, interface
from tailbound.doctor.verdict import choose
from tailbound.kernel import ethtool, linear
from tailbound_lab.lab import namespaces

pytestmark = pytest.mark.needs("root", "netns")


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    with nothing_more(), veths.pair("tbx", ("10.77.0.1", "10.77.0.2")) as (here, _):
        yield here


def seen(place: str) -> Interface:
    return namespaces.call(place, interface, "tbx")


def test_stripped_tags_are_noted(place: str) -> None:
    for on in (True, False):
        namespaces.call(place, ethtool.set_features, "tbx", on, ethtool.RXVLAN)
        link = seen(place)
        assert link.vlan_stripping is on
        assert any("ethtool -K tbx rxvlan off" in note for note in choose(facts.machine(), link).notes) is on


def test_queues_in_use_and_those_that_there_can_be(place: str) -> None:
    one = seen(place)
    assert (one.rx_queues, one.tx_queues) == (1, 1)
    namespaces.call(place, ethtool.set_queues, "tbx", 2)
    two = seen(place)
    assert (two.rx_queues, two.tx_queues) == (2, 2)
    assert two.tx_most == one.tx_most
    assert two.tx_most is not None
    assert two.tx_most >= 2


def test_how_much_of_a_frame_is_one_piece(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(place).linear == linear.PAGE
    monkeypatch.setattr("tailbound.kernel.net.driver_of", lambda name: "ice")
    assert seen(place).linear == linear.DRIVERS["ice"]

"""The scapy layer, built and dissected against literal bytes."""

from __future__ import annotations

import pytest

import cases
from golden import Golden, golden_packets
from tailbound.wire import packets
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import Flag

pytestmark = pytest.mark.needs("scapy")
PORT = 45999


@pytest.fixture(scope="module")
def layer():
    import scapy_layer

    scapy_layer.bind(PORT)
    yield scapy_layer
    scapy_layer.unbind(PORT)


@pytest.mark.parametrize("golden", golden_packets(), ids=lambda g: g.name)
def test_golden_packets_are_dissected(layer, golden: Golden) -> None:
    found = layer.Tailbound(golden.data)
    assert {n: getattr(found, n) for n in HEADER_DTYPE.names} == golden.fields
    assert bytes(found.payload) == golden.payload


@pytest.mark.parametrize("golden", golden_packets(), ids=lambda g: g.name)
def test_golden_packets_are_built(layer, golden: Golden) -> None:
    fields = {n: v for n, v in golden.fields.items() if n != "check"}
    assert bytes(layer.Tailbound(**fields) / golden.payload) == golden.data


@pytest.mark.parametrize("epoch", [0, 1])
def test_packets_with_tags_are_built(layer, monkeypatch: pytest.MonkeyPatch, epoch: int) -> None:
    """Rule: auth-1."""
    monkeypatch.setattr(layer.Tailbound, "keys", cases.KEYS)
    data = cases.tagged(cases.contribution(), epoch)
    found = layer.Tailbound(data)
    assert found.flags == (Flag.EPOCH if epoch else 0)
    fields = {n: getattr(found, n) for n in HEADER_DTYPE.names if n != "check"}
    assert bytes(layer.Tailbound(**fields) / bytes(found.payload)) == data


def test_a_given_check_stays(layer) -> None:
    assert layer.Tailbound(bytes(layer.Tailbound(check=5))).check == 5
    assert packets.parse(bytes(layer.Tailbound(type="BYE", check=5))) is None
    assert packets.parse(bytes(layer.Tailbound(type="BYE"))) is not None


def test_both_ports_lead_to_the_layer(layer) -> None:
    from scapy.layers.inet import IP, UDP

    # never scapy's default source port, 53: with the DNS layer loaded it would win
    for ports in ({"sport": 9, "dport": PORT}, {"sport": PORT, "dport": 9}):
        data = bytes(IP() / UDP(**ports) / layer.Tailbound(type="HOLD"))
        assert layer.Tailbound in IP(data)
    assert layer.Tailbound not in IP(bytes(IP() / UDP(sport=1, dport=2) / layer.Tailbound()))

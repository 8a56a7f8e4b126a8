"""Faults: the settings of an end give what was asked for between two workers, and the programs do it."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.errors import ConfigError
from tailbound.kernel import ethtool
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.faults import Fault, end_settings
from tailbound_lab.lab.spec import Burst
from tailbound_lab.lab.topology import Link

Make = Callable[..., Cluster]
Datagrams = Callable[..., socket.socket]

PROBABILITIES = st.floats(0, 0.7)


def both_ends(probability: float) -> float:
    return 1 - (1 - probability) ** 2


@given(loss=PROBABILITIES, duplicate=PROBABILITIES, corrupt=PROBABILITIES)
def test_two_ends_together_do_what_was_asked_for(loss: float, duplicate: float, corrupt: float) -> None:
    settings = end_settings(Fault(loss=loss, duplicate=duplicate, corrupt=corrupt))
    assert both_ends(settings.loss_good) == pytest.approx(loss, abs=1e-12)
    assert both_ends(settings.duplicate) == pytest.approx(duplicate, abs=1e-12)
    assert both_ends(settings.corrupt) == pytest.approx(corrupt, abs=1e-12)
    assert (settings.to_bad, settings.to_good) == (0, 0)


@given(loss=st.floats(1e-6, 0.7), length=st.floats(2, 1000))
def test_the_stationary_loss_and_the_length_of_bursts(loss: float, length: float) -> None:
    settings = end_settings(Fault(burst=Burst(loss, length)))
    share = settings.to_bad / (settings.to_bad + settings.to_good)
    assert 1 - (1 - share) ** 2 == pytest.approx(loss)
    assert 1 / settings.to_good == pytest.approx(length)
    assert settings.loss_good == 0
    assert settings.loss_bad == 1


@pytest.mark.parametrize("settings", [{"loss": 1.0}, {"loss": -0.1}, {"duplicate": 2.0}, {"corrupt": math.nan}])
def test_a_fault_that_cannot_be_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Fault(**settings)


def test_short_bursts_cannot_lose_almost_everything() -> None:
    with pytest.raises(ConfigError, match="make them longer"):
        Fault(burst=Burst(0.9, 1))
    assert Fault(burst=Burst(0.9, 10)).burst == Burst(0.9, 10)


# -- in a lab ---------------------------------------------------------------------------------------

in_a_lab = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")
PACKETS = 1500


@pytest.fixture
def exchange(datagram_socket: Datagrams) -> Iterator[Callable[..., list[int]]]:
    """``(lab, link)`` -> numbers of the datagrams that came, of PACKETS sent from worker 0 to worker 1."""

    def go(lab: Cluster, link: Link = Link.DATA) -> list[int]:
        receiver, sender = datagram_socket(lab, 1, link), datagram_socket(lab, 0, link)
        receiver.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)  # SO_RCVBUFFORCE
        for i in range(PACKETS):
            sender.sendto(i.to_bytes(4) + bytes(60), receiver.getsockname())
        # what follows without faults comes last: one way, one queue, in order
        lab.set_faults(Fault(), link=link)
        sender.sendto(b"end", receiver.getsockname())
        came = []
        while (data := receiver.recv(2048)) != b"end":
            came.append(int.from_bytes(data[:4]) if data[4:] == bytes(60) else -1)
        receiver.close()
        sender.close()
        return came

    return go


@in_a_lab
def test_counters_explain_every_packet(tailbound_lab: Make, exchange: Callable[..., list[int]]) -> None:
    lab = tailbound_lab(workers=2, cables=True)
    everything = Fault(loss=0.1, burst=Burst(0.1, 4), duplicate=0.2)
    for link in Link:
        before = lab.fault_counts(link=link)
        lab.set_faults(everything, link=link)
        came = exchange(lab, link)
        counts = lab.fault_counts(link=link)
        lost, doubled = counts.lost - before.lost, counts.duplicated - before.duplicated
        assert len(came) == PACKETS - lost + doubled
        assert lost > 100
        assert doubled > 100
        assert len(set(came)) < len(came)
        assert sorted(came) == came, "duplicates come side by side"
    assert lab.fault_counts() == lab.fault_counts(0) + lab.fault_counts(1)
    assert lab.fault_counts() == lab.fault_counts(link=Link.DATA) + lab.fault_counts(link=Link.PLAIN)
    assert lab.lost_frames() == 0


@in_a_lab
def test_a_seed_gives_the_same_fates_in_every_lab(tailbound_lab: Make, exchange: Callable[..., list[int]]) -> None:
    def fates(seed: int) -> list[int]:
        lab = tailbound_lab(workers=2, loss=0.1, burst=Burst(0.1), duplicate=0.1, corrupt=0.1, seed=seed)
        came = exchange(lab)
        lab.close()
        return came

    first = fates(1)
    assert first == fates(1)
    assert first != fates(2)


@in_a_lab
def test_a_flipped_bit_is_noticed_and_never_delivered(tailbound_lab: Make, exchange: Callable[..., list[int]]) -> None:
    lab = tailbound_lab(workers=2, corrupt=0.3)
    for worker in lab.workers:
        assert not any(
            lab.run(worker.rank, ethtool.features, name)[ethtool.TX_CHECKSUM] for name in ("data0", "plain0")
        )
    came = exchange(lab)
    counts = lab.fault_counts(link=Link.DATA)
    assert -1 not in came
    # a packet hit at both ends counts twice and is refused once
    assert PACKETS - counts.corrupted <= len(came) < PACKETS - 0.8 * counts.corrupted
    assert 0.25 * PACKETS < PACKETS - len(came) < 0.35 * PACKETS

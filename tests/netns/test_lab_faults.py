"""Faults: the settings of an end give what was asked for between two workers, and the programs do it."""

from __future__ import annotations

import math
import random
import socket
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.errors import ConfigError
from tailbound.kernel import ethtool
from tailbound.kernel.faults import FaultSettings
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.faults import Fault, FaultCounts, end_settings, seed_of
from tailbound_lab.lab.spec import Burst, LabSpec
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


def test_a_chain_with_these_settings_loses_that_much_in_such_bursts() -> None:
    settings = end_settings(Fault(burst=Burst(0.05, 6)))
    generator, bad, lost, bursts = random.Random(7), False, 0, 0
    packets = 400_000
    for _ in range(packets):
        if generator.random() < (settings.to_good if bad else settings.to_bad):
            bad = not bad
            bursts += bad
        lost += bad
    assert lost / packets == pytest.approx(1 - math.sqrt(0.95), rel=0.12)
    assert lost / bursts == pytest.approx(6, rel=0.1)


def test_nothing_asked_is_nothing_done() -> None:
    assert end_settings(Fault(), 5) == FaultSettings(seed=seed_of(5), loss_bad=1.0)
    assert end_settings(Fault(burst=Burst(0.0))) == end_settings(Fault())


@pytest.mark.parametrize("settings", [{"loss": 1.0}, {"loss": -0.1}, {"duplicate": 2.0}, {"corrupt": math.nan}])
def test_a_fault_that_cannot_be_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Fault(**settings)


def test_short_bursts_cannot_lose_almost_everything() -> None:
    with pytest.raises(ConfigError, match="make them longer"):
        Fault(burst=Burst(0.9, 1))
    assert Fault(burst=Burst(0.9, 10)).burst == Burst(0.9, 10)


def test_faults_of_a_spec() -> None:
    spec = LabSpec(workers=2, loss=0.1, burst=Burst(0.2, 3), duplicate=0.3, corrupt=0.4)
    assert Fault.of(spec) == Fault(0.1, Burst(0.2, 3), 0.3, 0.4)


def test_seeds_differ_by_every_part_and_never_vanish() -> None:
    seeds = {
        seed_of(s, link, rank, end) for s in range(8) for link in range(2) for rank in range(64) for end in range(2)
    }
    assert len(seeds) == 8 * 2 * 64 * 2
    assert all(0 < seed < 2**64 for seed in seeds)
    assert seed_of(1, 0, 3, 1) == seed_of(1, 0, 3, 1)
    bits = [sum(seed >> b & 1 for seed in seeds) / len(seeds) for b in range(64)]
    assert all(0.4 < share < 0.6 for share in bits)


def test_counts_add_up() -> None:
    assert FaultCounts(5, 1, 2, 3, 4) + FaultCounts(50, 10, 20, 30, 40) == FaultCounts(55, 11, 22, 33, 44)


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
def test_the_mean_loss_is_what_was_asked_for(tailbound_lab: Make, exchange: Callable[..., list[int]]) -> None:
    """Within four standard deviations of the binomial, and of a sum of bursts."""
    lab = tailbound_lab(workers=2, cables=True)
    for fault, variance in ((Fault(loss=0.2), 1.0), (Fault(burst=Burst(0.2, 5)), 9.0)):
        lab.set_faults(fault)
        lost = PACKETS - len(exchange(lab))
        assert abs(lost - 0.2 * PACKETS) < 4 * math.sqrt(variance * PACKETS * 0.2 * 0.8)


@in_a_lab
def test_bursts_are_bursts(tailbound_lab: Make, exchange: Callable[..., list[int]]) -> None:
    lab = tailbound_lab(workers=2, cables=True)
    runs = {}
    for fault in (Fault(loss=0.2), Fault(burst=Burst(0.2, 10))):
        lab.set_faults(fault)
        came = set(exchange(lab))
        fates = [i in came for i in range(PACKETS)]
        starts = sum(1 for a, b in zip([True, *fates], fates, strict=False) if a and not b)
        runs[fault] = fates.count(False) / starts
    independent, bursty = runs.values()
    assert independent == pytest.approx(1.25, abs=0.2)
    assert bursty > 5


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


@in_a_lab
def test_streams_survive_every_fault(tailbound_lab: Make) -> None:
    lab = tailbound_lab(workers=2, loss=0.05, duplicate=0.05, corrupt=0.03)
    payload = random.Random(3).randbytes(400_000)
    address = (lab.workers[1].plain_address, 5001)
    with lab.run(1, socket.create_server, address) as server:
        server.settimeout(60)
        with lab.run(0, socket.create_connection, address) as client:
            accepted, _ = server.accept()
            with accepted:
                accepted.settimeout(60)
                client.setsockopt(socket.SOL_SOCKET, 32, 1 << 20)  # SO_SNDBUFFORCE
                client.sendall(payload)
                client.shutdown(socket.SHUT_WR)
                got = bytearray()
                while data := accepted.recv(1 << 20):
                    got += data
    assert bytes(got) == payload
    counts = lab.fault_counts(link=Link.PLAIN)
    assert min(counts.lost, counts.corrupted) > 0
    assert counts.duplicated == 0  # only UDP is doubled: a copy bypasses the cable's bridge, and TCP's order with it


@in_a_lab
def test_faults_of_one_worker_are_not_those_of_others(tailbound_lab: Make, datagram_socket: Datagrams) -> None:
    lab = tailbound_lab(workers=3, cables=True)
    lab.set_faults(Fault(loss=0.99), rank=2)
    receiver, sender = datagram_socket(lab, 1), datagram_socket(lab, 0)
    for _ in range(200):
        sender.sendto(b"x", receiver.getsockname())
        assert receiver.recv(10) == b"x"
    assert lab.fault_counts(2).seen == 0
    assert lab.fault_counts().lost == 0
    third = datagram_socket(lab, 2)
    for _ in range(200):
        sender.sendto(b"x", third.getsockname())
    lab.set_faults(Fault())
    sender.sendto(b"end", third.getsockname())
    while third.recv(10) != b"end":
        pass
    assert lab.fault_counts(2).lost > 150

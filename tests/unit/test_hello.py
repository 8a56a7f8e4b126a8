"""The proof before the first op that all ranks hear each other: who is deaf is named, by every rank."""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from support import MemoryStore, gradients, greeting, patient, team
from tailbound.collective import paths as ways
from tailbound.collective.communicator import Communicator
from tailbound.collective.paths import ANSWERS, BURST, SMALL, TRIES, WIDE, Paths
from tailbound.errors import TransportError
from tailbound.transport.config import MS, Config
from tailbound.transport.control import Header
from tailbound.wire.schema import Flag, PacketType, Verdict


@pytest.mark.parametrize(
    ("ranks", "drop", "lines"),
    [
        (3, lambda sender, receiver, _: (sender, receiver) == (0, 1), ["rank 1 does not hear rank 0: nothing from .*"]),
        (3, lambda *_: True, [
            f"rank {r} does not hear ranks {others}: .*" for r, others in enumerate(("1-2", "0, 2", "0-1"))
        ]),
        (2, lambda sender, receiver, size: size > 200, [
            rf"rank {r} hears rank {1 - r}, but no packets of {20 + 8 + 64 + 256} bytes .* MTU .*" for r in range(2)
        ]),
    ],
    ids=["one direction", "nothing", "full rows"],
)  # fmt: skip
def test_who_does_not_hear_whom_is_named_by_all(
    monkeypatch: pytest.MonkeyPatch, ranks: int, drop: Callable[[int, int, int], bool], lines: list[str]
) -> None:
    """``drop(sender, receiver, bytes)``: whether a packet of the proof is lost."""
    send = Paths._send

    def lossy(paths: Paths, port: int, peer: int, packets: list[bytes]) -> int:
        kept = [packet for packet in packets if not drop(paths._job.rank, peer, len(packet))]
        return send(paths, port, peer, kept) if kept else 0

    monkeypatch.setattr(Paths, "_send", lossy)
    monkeypatch.setattr(ways, "LIMIT", 500 * MS)
    store = MemoryStore()

    def refusal(rank: int) -> str:
        with pytest.raises(TransportError) as error:
            Communicator(store, Config(**patient(rank=rank, ranks=ranks)), datapath="udp").close()
        return str(error.value)

    with ThreadPoolExecutor(ranks) as threads:
        refusals = list(threads.map(refusal, range(ranks)))
    for rank, said in enumerate(refusals):
        first, *found, last = said.splitlines()
        assert first == f"rank {rank}: UDP does not pass between all ranks, let firewalls pass it:"
        assert len(found) == len(lines)
        assert all(re.fullmatch(f"  {line}", each) for line, each in zip(lines, found, strict=True)), found
        if "does not hear" in said:
            assert re.search(r"to UDP port \d+ of 127\.0\.0\.1; let it in \(firewall", said)
        assert "TAILBOUND_PORT" in last


def test_a_rank_whose_bursts_do_not_arrive_sends_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Offload takes bursts and sends nothing. How rows leave then is in ``sim/test_paths``."""
    send = Paths._send

    def single(paths: Paths, port: int, peer: int, packets: list[bytes]) -> int:
        return 0 if len(packets) > 1 and paths._job.rank == 1 else send(paths, port, peer, packets)

    monkeypatch.setattr(Paths, "_send", single)
    with team(3, patient()) as job:
        job.allreduce(gradients("U", 3, 5000, seed=1))
        assert [job[rank].job.sender.plain for rank in range(3)] == [set(), {0, 2}, set()]
    (said,) = (text for text in caplog.messages if "bursts by UDP segmentation offload do not reach" in text)
    assert f"kernel {os.uname().release}, lo" in said
    assert "ethtool -K lo tx-udp-segmentation off" in said


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Paths:
    """Those of rank 0 to ranks 1 and 2, which are sent nothing."""
    monkeypatch.setattr(Paths, "_send", lambda *_: 0)
    job: Any = Mock(peers=[1, 2], rank=0)
    job.store.width, job.membership.gone, job.row_bytes, job.sender.ports = 1408, set(), 1500, [(0,)]
    job.sender.channel, job.sender.plain, job.now.return_value = {1: 0, 2: 0}, set(), 0
    job.records.verdicts.return_value = np.zeros((3, len(Verdict)), int)
    return Paths(job, lambda: "lo")


def says(paths: Paths, peer: int, told: int, *, answer: bool = True) -> None:
    """A packet of ``peer`` that tells what has come of the newest trial of its path."""
    flags = 0 if answer else int(Flag.REPEAT)
    trial = paths.by_peer[peer].trial
    paths.receive(Header(type=PacketType.HELLO, sender=peer, flags=flags, row=9, count=trial, seq=told), b"")


def test_who_has_said_enough_is_tried_no_more_and_others_less_and_less(paths: Paths) -> None:
    for peer in (1, 2):
        paths.begin(peer, 0)
    assert paths.due(0) == [1, 2]
    says(paths, 1, SMALL | WIDE | BURST)
    times = [0]
    for _ in range(20):
        assert paths.due(times[-1]) == [2]
        paths.ask(2, times[-1])
        times.append(paths.by_peer[2].tries.due)
    gaps = [later - one for one, later in itertools.pairwise(times)]
    assert (gaps[0], gaps, gaps[-1]) == (TRIES.first, sorted(gaps), TRIES.most)
    for _ in range(ANSWERS):
        assert 2 in paths.due(times[-1])
        says(paths, 2, SMALL | WIDE, answer=False)  # what a peer's own tries say is no answer to another burst
        says(paths, 2, SMALL | WIDE)
    assert (paths.due(times[-1]), paths._job.sender.plain) == ([], {2})


def test_half_of_a_burst_has_to_arrive_and_a_trial_begins_with_nothing(paths: Paths) -> None:
    def heard(trial: int, places: Iterable[int]) -> int:
        for place in places:
            head = Header(type=PacketType.HELLO, sender=1, flags=Flag.REPEAT, row=trial, rows=place)
            paths.receive(head, bytes(1408))
        return paths.by_peer[1].heard

    assert heard(7, [1] * paths.burst) == WIDE  # one packet of each try
    assert heard(7, range(1, paths.burst // 2 + 1)) == WIDE | BURST
    assert heard(8, [0]) == WIDE


def test_what_a_rank_has_refused_and_could_not_send_is_told(paths: Paths) -> None:
    job: Any = paths._job
    greetings = [greeting(rank, ranks=3) for rank in range(3)]  # at 10.0.0.0 to 10.0.0.2
    says(paths, 1, 0, answer=False)
    paths.by_peer[1].heard |= WIDE
    job.records.verdicts()[1, Verdict.WRONG_ADDRESS] = 7
    for path in paths.by_peer.values():
        path.refused = errno.EPERM
    paths.by_peer[1].told = SMALL | WIDE  # a later try has arrived
    deaf, unsent = paths.lacks(greetings)
    assert "nothing from 10.0.0.2 came to UDP port 5515 of 10.0.0.0" in deaf
    assert "7 WRONG_ADDRESS" in deaf
    assert "translated" in deaf
    assert unsent == "rank 0 cannot send to rank 2 at 10.0.0.2: Operation not permitted"

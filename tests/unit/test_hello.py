"""The proof before the first op that all ranks hear each other: who is deaf is named, by every rank."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from support import MemoryStore, gradients, greeting, patient, team
from tailbound.collective import hello
from tailbound.collective.communicator import Communicator
from tailbound.collective.hello import Hello, Report, complaints
from tailbound.collective.trials import ANSWERS, BURST, SMALL, WIDE, Trials
from tailbound.errors import TransportError
from tailbound.transport.config import MS, Config


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
    send = Trials._send

    def lossy(trials: Trials, port: int, peer: int, packets: list[bytes]) -> int:
        kept = [packet for packet in packets if not drop(trials._job.rank, peer, len(packet))]
        return send(trials, port, peer, kept) if kept else 0

    monkeypatch.setattr(Trials, "_send", lossy)
    monkeypatch.setattr(hello, "LIMIT", 500 * MS)
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
    send = Trials._send

    def single(trials: Trials, port: int, peer: int, packets: list[bytes]) -> int:
        return 0 if len(packets) > 1 and trials._job.rank == 1 else send(trials, port, peer, packets)

    monkeypatch.setattr(Trials, "_send", single)
    with team(3, patient()) as job:
        job.allreduce(gradients("U", 3, 5000, seed=1))
        assert [job[rank].job.sender.plain for rank in range(3)] == [set(), {0, 2}, set()]
    (said,) = (text for text in caplog.messages if "bursts by UDP segmentation offload do not reach" in text)
    assert f"kernel {os.uname().release}, lo" in said
    assert "ethtool -K lo tx-udp-segmentation off" in said


def test_who_is_settled_sends_no_more_and_others_less_and_less() -> None:
    talk = Hello([1, 2], 0)
    assert [talk.poll(0), talk.poll(0)] == [[1, 2], []]
    talk.receive(1, WIDE, SMALL | WIDE | BURST)
    times = []
    for _ in range(20):
        times.append(talk.due)
        assert talk.poll(talk.due) == [2]
    gaps = [later - one for one, later in itertools.pairwise(times)]
    assert (times[0], gaps, gaps[-1]) == (hello.TRIES.first, sorted(gaps), hello.TRIES.most)
    talk.receive(2, SMALL, SMALL | WIDE | BURST)
    assert not talk.complete
    talk.receive(2, WIDE, 0)
    assert (talk.complete, talk.due, talk.plain) == (True, 0, set())


def test_a_peer_that_no_burst_reaches_gets_none() -> None:
    talk = Hello([1, 2], 0)
    talk.receive(1, WIDE, SMALL)
    assert 1 in talk.poll(0), "it is heard, but may not hear"
    talk.receive(1, WIDE, SMALL | WIDE | BURST)
    for _ in range(ANSWERS):
        assert not talk.complete
        talk.receive(2, WIDE, SMALL | WIDE, answer=False)  # what a peer's own tries say is no answer to another burst
        talk.receive(2, 0, SMALL | WIDE)
    assert talk.complete
    assert talk.plain == {2}


def test_what_a_rank_has_refused_and_could_not_send_is_told() -> None:
    greetings = [greeting(rank, ranks=2) for rank in range(2)]  # at 10.0.0.0 and 10.0.0.1
    reports = [Report(deaf=[1], refused={"WRONG_ADDRESS": 7}), Report(unsent={"0": "Operation not permitted"})]
    deaf, unsent = complaints(greetings, reports, 1408)
    assert "nothing from 10.0.0.1 came to UDP port 5515 of 10.0.0.0" in deaf
    assert "7 WRONG_ADDRESS" in deaf
    assert "translated" in deaf
    assert unsent == "rank 1 cannot send to rank 0 at 10.0.0.0: Operation not permitted"
    assert complaints(greetings, [Report(), reports[1]], 1408) == []  # a later try has arrived

"""Whole all-reduces over udp in one process with something wrong: packets, ranks, layouts, closing."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import numpy as np
import pytest

from support import MS, PATIENCE, Team, Trouble, exact_mean, gradients, hasty, nmse, patient, team
from tailbound.codec.records import Coding, Received
from tailbound.codec.shape import Shape
from tailbound.collective.coder import HostCoder
from tailbound.collective.communicator import Communicator
from tailbound.datapath.udp import UdpDatapath
from tailbound.wire.schema import PacketType

NUMEL = 8 * 64 * 256
ROWS = 8 * 64


def warm_up(job: Team, ops: int = 3, numel: int = NUMEL, ranks: list[int] | None = None) -> None:
    """Ops enough for warm scales and for predictions; one that a loaded machine spoils does not count."""
    whole = 0
    for op in range(20):
        if whole == ops:
            return
        results = job.allreduce(gradients("U", len(job), numel, seed=1000 + op), ranks)
        whole = whole + 1 if all(o.delivered == o.expected for _, o in results) else 0
    pytest.fail("never whole")


def only(results: list[Any], dead: int) -> bool:
    """Whether all rows are there but those of ``dead``: a loaded machine may hold up another rank for too long, too."""
    outcomes = [outcome for _, outcome in results]
    missed = outcomes[0].missed  # what the dead rank owns; the others own the rest, and lack its contributions to that
    lost = sum(o.expected - o.delivered for o in outcomes)
    same = all(o.missing == {dead} and o.missed == missed for o in outcomes)
    return same and lost == ROWS - missed + len(outcomes) * missed


def suspects(job: Team) -> dict[int, list[int]]:
    """Whom each rank suspects; a rank that did not run for a while judges nobody in that step."""
    found = {member.config.rank: member.stats()["suspects"] for member in job.communicators}
    return {rank: those for rank, those in found.items() if those}


def silence(communicator: Communicator) -> Trouble:
    """From now on nothing leaves this rank, as if its process had been killed."""
    return Trouble(seed=0, loss=1.0).attach(communicator)


def seconds(communicator: Communicator) -> float:
    """How long an op may take here, on a machine that is busy with other things."""
    return communicator.config.bound / 1e9 + 2


# -- packets ------------------------------------------------------------------------------------------------------


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> dict[int, np.ndarray]:
    """Address of an op's output -> where each row of it was read from (-1: missing)."""
    seen: dict[int, np.ndarray] = {}
    original = HostCoder.decode

    def decode(received: Received, shape: Shape, coding: Coding, out: np.ndarray, *rest: Any, **named: Any) -> int:
        seen[out.ctypes.data] = received.source.copy()
        return original(received, shape, coding, out, *rest, **named)

    monkeypatch.setattr(HostCoder, "decode", staticmethod(decode))
    return seen


def test_five_percent_of_everything_lost(sources: dict[int, np.ndarray]) -> None:
    """Contributions, results, READYs, tails, in the cold op too: every op ends, errors are those of codec-17,
    and two ranks differ only in groups of which one of them lacks a row."""
    ranks, errors, group = 4, [], 64 * 256
    with team(ranks, patient(quiet=20 * MS, repair=False)) as job:
        # of this seed three ranks lose one of their first three packets: READYs of the cold op
        troubles = [Trouble(seed=288, loss=0.05).attach(member) for member in job.communicators]
        for op in range(25):
            inputs = gradients("U", ranks, NUMEL, seed=op)
            outs = [np.full(NUMEL, np.nan, np.float32) for _ in range(ranks)]
            begun = time.monotonic()
            outcomes = job.each(
                lambda c, x=inputs, outs=outs: c.allreduce(x[c.config.rank], outs[c.config.rank]).result(PATIENCE)
            )
            assert time.monotonic() - begun < seconds(job[0])
            assert all(o.error is None and o.overwritten == 0 for o in outcomes)
            assert all(np.isfinite(out).all() for out in outs)
            errors.append(np.mean([nmse(out, exact_mean(inputs)) for out in outs]))
            had = [(sources[out.ctypes.data] != -1).reshape(8, 64).all(axis=1) for out in outs]
            for a in range(ranks):
                for b in range(a):
                    for g in np.flatnonzero(had[a] & had[b]):
                        np.testing.assert_array_equal(outs[a][g * group :][:group], outs[b][g * group :][:group])
        assert sum(o.delivered for o in outcomes) < sum(o.expected for o in outcomes)
        kinds = {kind for trouble in troubles for _, kind in trouble.dropped}
        assert kinds >= {PacketType.CONTRIBUTION, PacketType.RESULT, PacketType.READY}
        assert np.mean(errors) <= 8e-2 + 6e-2
        for member in job.communicators:
            stats = member.stats()
            assert 0.90 < stats["delivered"] < 0.98
            assert stats["suspects"] == []
            assert "SCALE_MISMATCH" not in stats["drops"]


def test_doubled_and_shuffled_packets_change_no_bit() -> None:
    ranks, cookie, ops = 3, 77, 6
    clean = []
    with team(ranks, patient(), cookie=cookie) as job:
        clean = [job.allreduce(gradients("U", ranks, NUMEL, seed=op))[0][0] for op in range(ops)]
    with team(ranks, patient(), cookie=cookie) as job:
        troubles = [Trouble(seed=2, duplicate=0.2, shuffle=True).attach(member) for member in job.communicators]
        for op in range(ops):
            for out, outcome in job.allreduce(gradients("U", ranks, NUMEL, seed=op)):
                assert outcome.delivered == outcome.expected
                np.testing.assert_array_equal(out.view(np.uint32), clean[op].view(np.uint32))
        assert sum(t.doubled for t in troubles) > 100
        drops: dict[str, int] = {}
        for member in job.communicators:
            for name, count in member.stats()["drops"].items():
                drops[name] = drops.get(name, 0) + count
        # a copy may find its own op over, that is all
        assert set(drops) <= {"DUPLICATE", "DUPLICATE_RESULT", "STALE_OP", "STALE_RESULT", "LATE"}
        assert drops["DUPLICATE"] > 0
        assert drops["DUPLICATE_RESULT"] > 0


def test_corrupt_packets_are_counted_and_never_summed() -> None:
    ranks = 3
    with team(ranks, patient(quiet=20 * MS, repair=False)) as job:
        warm_up(job)
        before = [member.stats()["rows_summed"] for member in job.communicators]
        kinds = frozenset({PacketType.CONTRIBUTION})
        troubles = [Trouble(seed=3, corrupt=0.05, types=kinds).attach(member) for member in job.communicators]
        errors, expected, delivered = [], 0, 0
        for op in range(10):
            inputs = gradients("I", ranks, NUMEL, seed=op)  # one flipped bit that got in would be far off the bound
            results = job.allreduce(inputs)
            errors += [nmse(out, exact_mean(inputs)) for out, _ in results]
        job.each(lambda c: c.meet("quiet"))
        flipped = sum(t.flipped for t in troubles)
        stats = [member.stats() for member in job.communicators]
        assert flipped > 100
        assert sum(s["drops"].get("CORRUPT", 0) for s in stats) == flipped
        assert all(s["drops_by_sender"]["unknown"]["CORRUPT"] == s["drops"]["CORRUPT"] for s in stats)
        expected = sum(s["ledger"]["contributions"][p]["expected"] for s in stats for p in s["ledger"]["contributions"])
        delivered = sum(s["ledger"]["contributions"][p]["taken"] for s in stats for p in s["ledger"]["contributions"])
        late = sum(s["drops"].get(reason, 0) for s in stats for reason in ("LATE", "STALE_OP"))
        assert flipped <= expected - delivered <= flipped + late  # late: where a thread stood still for longer than q
        assert sum(s["rows_summed"] for s in stats) == delivered
        assert sum(before) < delivered
        assert max(errors) <= 1e-3


def test_every_packet_is_accounted_for() -> None:
    """Packets sent + doubled - lost = packets that some verdict counts, and every row expected is summed or missing.

    Rule: kernel-21.
    """
    ranks = 3
    with team(ranks, patient(quiet=20 * MS)) as job:
        troubles = [Trouble(seed=9, loss=0.03, duplicate=0.03).attach(member) for member in job.communicators]
        for op in range(10):
            job.allreduce(gradients("U", ranks, NUMEL, seed=op))
        assert all(job.each(lambda c: c.drain(PATIENCE)))
        assert all(t.dropped for t in troubles)

        def balance() -> int:
            stats = [member.stats() for member in job.communicators]
            sent = sum(peer["packets"] for s in stats for peer in s["sent"].values())
            sent += sum(s["verdicts"].get("REFLECTED", 0) for s in stats)  # sent back by the datapath itself
            sent += sum(t.doubled - sum(t.dropped.values()) for t in troubles)
            return sent - sum(count for s in stats for count in s["verdicts"].values())

        until = time.monotonic() + PATIENCE
        while balance() and time.monotonic() < until:
            job.each(lambda c: c.drain(PATIENCE))
        assert balance() == 0


def test_without_any_event_every_op_ends_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads an event, and none wakes anybody: maps are read again in every turn (kernel-22)."""
    silent = os.eventfd(0, os.EFD_NONBLOCK)
    fds = UdpDatapath.fds
    monkeypatch.setattr(UdpDatapath, "fds", lambda path: (silent, fds(path)[1]))
    monkeypatch.setattr(UdpDatapath, "events", lambda path: pytest.fail("an event was read"))
    try:
        with team(3, patient()) as job:
            for op in range(4):
                results = job.allreduce(gradients("U", 3, NUMEL, seed=op))
                assert all(o.delivered == o.expected and o.deadline_hits == 0 for _, o in results)
    finally:
        os.close(silent)


# -- ranks --------------------------------------------------------------------------------------------------------


def test_a_rank_dies_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """Rules: clock-9, clock-14. Exact times, and who is in which row: ``sim/test_ranks.py``."""
    ranks = 3
    dead, live = ranks - 1, list(range(ranks - 1))
    with team(ranks, hasty()) as job:
        warm_up(job)
        dumb = silence(job[dead])
        held: list[np.ndarray] = []
        cut = 0
        with caplog.at_level(logging.WARNING, "tailbound"):
            for op in range(20):
                inputs = gradients("U", ranks, NUMEL, seed=op)
                held.append(inputs[dead])
                begun = time.monotonic()
                results = job.allreduce(inputs, ranks=live)
                assert time.monotonic() - begun < seconds(job[0])
                assert all(dead in o.missing for _, o in results)
                if not only(results, dead):
                    continue
                for out, _ in results:
                    # a third of every group and a third of the contributors gone
                    assert nmse(out, exact_mean(inputs[:dead])) <= 1.15 / (ranks - 1) + 2e-3
                    np.testing.assert_array_equal(out, results[0][0])
                if not any(o.deadline_hits for _, o in results):
                    break
                cut += 1
            else:
                pytest.fail("still waited for")
        assert cut
        said = [record.getMessage() for record in caplog.records]
        for rank in live:
            stats = job[rank].stats()
            assert stats["suspects"] == stats["dead"] == [dead]
            assert any(text.startswith(f"rank {rank}: rank {dead} has sent no contribution") for text in said)
        # by one of them at least: it may own nothing any more before the next one has missed its results three times
        assert any(f": rank {dead} has published no result" in text for text in said)
        dumb.detach()
        for op, data in enumerate(held):  # back: first it goes through what it missed
            outcome = job[dead].allreduce(data.copy()).result(PATIENCE)
            assert outcome.error is None, op
        for op in range(40):
            inputs = gradients("U", ranks, NUMEL, seed=100 + op)
            results = job.allreduce(inputs)
            if all(not o.missing and o.delivered == o.expected for _, o in results) and not suspects(job):
                break
        else:
            pytest.fail(f"never whole again: {[o for _, o in results]}, {suspects(job)}")
        assert nmse(results[0][0], exact_mean(inputs)) <= 1.5e-3


def test_a_rank_that_leaves_says_so() -> None:
    """Rule: clock-15."""
    ranks = 3
    with team(ranks, patient()) as job:
        warm_up(job)
        job[1].close()
        results = job.allreduce(gradients("U", ranks, NUMEL, seed=0), ranks=[0, 2])
        assert all(o.deadline_hits == 0 and o.error is None for _, o in results)
        assert job[0].stats()["gone"] == job[2].stats()["gone"] == [1]
        assert job[0].stats()["suspects"] == []


# -- layouts and closing ------------------------------------------------------------------------------------------


def test_closing_with_an_op_in_flight_ends_it() -> None:
    """Rank 0 closes while it waits for rank 1: its op ends with what it has, rank 1 hears that it is gone."""
    with team(2, hasty()) as job:
        warm_up(job)
        data = gradients("U", 2, NUMEL, seed=0)
        future = job[0].allreduce(data[0].copy())
        begun = time.monotonic()
        job[0].close()
        assert time.monotonic() - begun < 2 * seconds(job[0])
        assert future.result(0).error is None
        outcome = job[1].allreduce(data[1].copy()).result(PATIENCE)
        assert outcome.error is None


def test_a_failed_transport_completes_every_future(monkeypatch: pytest.MonkeyPatch) -> None:
    with team(2, hasty()) as job:
        warm_up(job)
        data = gradients("U", 2, NUMEL, seed=0)

        def broken(*_: Any) -> int:
            raise OSError("no more memory")

        monkeypatch.setattr(job[0].job.flow.queue, "submit", broken)
        outcome = job[0].allreduce(data[0].copy()).result(PATIENCE)
        assert outcome.error is not None
        assert "no more memory" in str(outcome.error)


def test_a_callback_that_fails_does_not_end_the_transport(caplog: pytest.LogCaptureFixture) -> None:
    with team(1, patient()) as job:
        data = np.ones(100, np.float32)

        def broken(outcome: Any) -> None:
            raise ValueError("not my day")

        with caplog.at_level(logging.ERROR, "tailbound"):
            job[0].launch(0, data, data, last=True, done=broken)
            assert job[0].allreduce(data).result(PATIENCE).error is None
        assert "callback" in caplog.text


def test_accounts_that_fail_cost_no_future() -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("no room for this")

    with team(2, patient()) as job:
        warm_up(job, 1)
        accounts = job[0].job.accounts
        accounts.delivered = accounts.in_pieces = broken  # type: ignore[method-assign]
        for _, outcome in job.allreduce(gradients("U", 2, NUMEL, seed=1)):
            assert outcome.error is None
        assert job[0].job.events.counts["learning_failed"] == 2

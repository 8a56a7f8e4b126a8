"""A rank that leaves answers those who stay for as long as they may ask, and no longer (clock-15, clock-35)."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
from typing import Any

import numpy as np
import pytest

from support import MS, PATIENCE, Trouble, await_that, gradients, patient, team
from tailbound.collective import communicator
from tailbound.collective.communicator import Communicator
from tailbound.errors import TransportError
from tailbound.transport.deadline import WARM_UP_OPS
from tailbound.wire.schema import PacketType

NUMEL = 2 * 64 * 256
SETTINGS = patient(quiet=20 * MS, fetch=10_000 * MS)


@pytest.mark.parametrize("repair", [True, False])
def test_results_that_others_miss_are_fetched_from_who_has_left(repair: bool) -> None:
    """Its last results are lost, repeated ones too, and it closes as soon as it has its own average."""
    ranks = 3
    with team(ranks, SETTINGS | {"repair": repair}) as job:
        for op in range(WARM_UP_OPS + 2):
            job.allreduce(gradients("U", ranks, NUMEL, seed=op))
        Trouble(seed=4, loss=1.0, types=frozenset({PacketType.RESULT})).attach(job[0])
        inputs = gradients("U", ranks, NUMEL, seed=99)
        leaving = threading.Thread(target=job[0].close)

        def last(member: Communicator) -> Any:
            rank = member.config.rank
            out = np.full_like(inputs[rank], np.nan)
            outcome = member.allreduce(inputs[rank], out).result(PATIENCE)
            if rank == 0:
                leaving.start()
            return out, outcome

        results = job.each(last)
        for out, outcome in results:
            assert outcome.missed == 0
            np.testing.assert_array_equal(out, results[0][0])
        assert sum(member.job.counters["rows_fetched"] for member in job.communicators[1:]) > 0
        job.each(Communicator.close, [1, 2])
        leaving.join(PATIENCE)


def test_who_leaves_stays_no_longer_than_the_others() -> None:
    """It sleeps meanwhile, and takes nothing new upon itself."""
    with team(2, SETTINGS) as job:
        for op in range(4):
            job.allreduce(gradients("U", 2, NUMEL, seed=op))
        engine, calls = job[0]._engine, [0]
        serve = engine._serve

        def counted(now: int) -> int:
            calls[0] += 1
            return serve(now)

        engine._serve = counted  # type: ignore[method-assign]
        leaving = threading.Thread(target=job[0].close)
        leaving.start()
        await_that(lambda: 0 in job[1].job.membership.gone, "its goodbye has come")
        assert engine.call(lambda: 1).result(PATIENCE) == 1
        with pytest.raises(TransportError, match="closed"):
            engine.ask(engine.position)
        job[1].close()
        leaving.join(5)  # and not the ten seconds of ``fetch``
        assert not leaving.is_alive()
        assert calls[0] < 50
        with pytest.raises(TransportError, match="closed"):
            engine.call(lambda: 1)


def events(member: Communicator, kind: str) -> list[dict[str, Any]]:
    return [event for event in member.stats()["events"] if event["event"] == kind]


def test_ranks_that_end_after_the_same_step_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with team(3, SETTINGS) as job:
        for op in range(4):
            job.allreduce(gradients("U", 3, NUMEL, seed=op))
        leaving = threading.Thread(target=job[2].close)
        leaving.start()
        await_that(lambda: 2 in job[0].job.membership.gone, "its goodbye has come")
        job[0]._engine.ask(lambda: None)
        assert events(job[0], "rank_left") == []
        job.each(Communicator.close, [0, 1])
        leaving.join(PATIENCE)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING and "rank 2" in record.message]


def test_who_goes_on_after_a_goodbye_warns_once_of_who_said_it(caplog: pytest.LogCaptureFixture) -> None:
    """A rank whose program ends before those of the others: they trained on without a word. Rule: clock-15."""
    with team(3, SETTINGS | {"first_step": 50}) as job:
        for op in range(4):
            job.allreduce(gradients("U", 3, NUMEL, seed=op))
        leaving = threading.Thread(target=job[2].close)
        leaving.start()
        await_that(lambda: all(2 in job[rank].job.membership.gone for rank in (0, 1)), "its goodbye has come")
        for op in range(4, 7):
            job.allreduce(gradients("U", 3, NUMEL, seed=op), [0, 1])
        for rank in (0, 1):
            (found,) = events(job[rank], "rank_left")
            assert (found["left"], found["step"]) == (2, 53)
        job.each(Communicator.close, [0, 1])
        leaving.join(PATIENCE)
    assert caplog.text.count("rank 2 has left the job after step 53, and this one goes on (step 54)") == 2


@pytest.mark.parametrize("how", ["at exit", "with"])
def test_a_rank_that_raises_says_no_goodbye(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """The others saw it leave as one that is through, at level INFO. Rules: clock-14, clock-15."""
    with team(3, SETTINGS | {"first_step": 50}) as job:
        for op in range(4):
            job.allreduce(gradients("U", 3, NUMEL, seed=op))
        waits = job[2].allreduce(gradients("U", 3, NUMEL, seed=9)[2])
        if how == "with":
            with pytest.raises(RuntimeError), job[2]:
                raise RuntimeError
        else:
            monkeypatch.setattr(sys, "last_value", RuntimeError(), raising=False)  # as an uncaught exception does
            monkeypatch.setattr(communicator, "_open", {job[2]})
            communicator._close_all()
        assert isinstance(waits.result(PATIENCE).error, TransportError)
        for rank in (0, 1):
            await_that(lambda r=rank: events(job[r], "rank_died"), "its death is known")  # type: ignore[misc]
            (found,) = events(job[rank], "rank_died")
            assert (found["died"], found["step"]) == (2, 54)
            assert 2 not in job[rank].job.membership.gone
    said = [r for r in caplog.records if "the process of rank 2 has ended (step 54)" in r.message]
    assert [r.levelno for r in said] == [logging.WARNING] * 2


@pytest.mark.parametrize(("ends", "farewell"), [("raise ValueError", False), ("sys.exit(1)", True)])
def test_how_a_program_ends_decides_whether_it_says_goodbye(ends: str, farewell: bool) -> None:
    program = f"""
        import sys
        from tailbound.collective import communicator

        class Open:
            def close(self, *, farewell):
                print(farewell)

        kept = Open()
        communicator._open.add(kept)
        try:
            raise KeyError
        except KeyError:  # which is no end
            pass
        {ends}
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, env=os.environ, check=False
    )
    assert found.stdout.split() == [str(farewell)], found.stderr

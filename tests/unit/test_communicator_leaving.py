"""A rank that leaves answers those who stay for as long as they may ask, and no longer (clock-15, clock-35)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from support import MS, PATIENCE, Trouble, await_that, gradients, patient, team
from tailbound.collective.communicator import Communicator
from tailbound.errors import TransportError
from tailbound.transport.deadline import WARM_UP_OPS
from tailbound.wire.schema import PacketType

NUMEL = 2 * 64 * 256
SETTINGS = patient(quiet=20 * MS, fetch=10_000 * MS)


@pytest.mark.parametrize("repair", [True, False])
def test_results_that_others_miss_are_fetched_from_who_has_left(repair: bool) -> None:
    """Six of ten of its last results are lost, repeated ones too, and it closes as soon as it has its own average.

    So many that some are lost with all three answers.
    """
    ranks = 3
    with team(ranks, SETTINGS | {"repair": repair}) as job:
        for op in range(WARM_UP_OPS + 2):
            job.allreduce(gradients("U", ranks, NUMEL, seed=op))
        Trouble(seed=4, loss=0.6, types=frozenset({PacketType.RESULT})).attach(job[0])
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

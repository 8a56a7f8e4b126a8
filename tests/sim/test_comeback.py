"""A rank that is back, and a peer that has not heard of it: no rank is left out for good (clock-32)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import cast

import numpy as np

from sim.team import SimTeam, sim_team
from support import gradients, hasty
from tailbound.collective.comeback import WELCOME, ask_all
from tailbound.errors import TransportError
from tailbound.transport.reliable import Reliable
from tailbound_lab.simulate.fabric import MS

RANKS, BACK, DEAF = 4, 3, 1
NUMEL = 64 * 256


class _Path:
    """The reliable path of rank ``BACK``: ``DEAF`` hears nothing until it is told to listen."""

    def __init__(self, job: SimTeam) -> None:
        self._job, self._deaf, self.listen = job, True, threading.Event()
        self.answered: queue.Queue[int] = queue.Queue()
        self.closing: list[Callable[[], None]] = []

    def keep(self, rank: int, timeout: float) -> None:
        return None

    def pull(self, rank: int, name: str, request: bytes, timeout: float, most: int) -> bytes:
        if rank == DEAF and self._deaf:
            self._deaf = False
            raise TransportError("no answer in time: start it")
        if rank == DEAF:
            self.listen.wait(30)
        assert name == WELCOME
        engine = self._job[rank]._engine
        stamp = engine.ask(lambda: engine.welcome(BACK, self._job[BACK].step))
        self.answered.put(rank)
        return stamp.to_bytes(8, "big")

    def before_close(self, action: Callable[[], None]) -> None:
        self.closing.append(action)

    def runs(self, body: Callable[[], None], name: str) -> None:
        threading.Thread(target=body, name=name, daemon=True).start()


def test_a_peer_that_misses_the_welcome_is_asked_again_and_its_rows_bring_it_in() -> None:
    """It has heard a goodbye of the process before: until it is told, it waits for no row of the new one."""
    with sim_team(RANKS, hasty(width=64, ring_mib=1.0)) as job:
        for op in range(3):
            job.allreduce(gradients("U", RANKS, NUMEL, seed=op))
        for rank in range(BACK):
            job[rank].job.membership.bye(BACK, 0)
            job[rank].job.publish_live()
        path = _Path(job)
        members = job[BACK].job.membership
        assert ask_all(job[BACK]._engine, cast(Reliable, path), job[BACK].step) == {0, 2}
        assert (members.suspects, members.gone) == ({DEAF}, set())
        assert {path.answered.get(timeout=30) for _ in range(2)} == {0, 2}
        inputs = gradients("U", RANKS, NUMEL, seed=10)
        (_, without), *_ = job.allreduce(inputs, [BACK, 0, 2, DEAF])
        assert without.error is None
        path.listen.set()
        assert path.answered.get(timeout=30) == DEAF
        assert job[DEAF].job.membership.gone == set()
        for op in range(4):
            results = job.allreduce(gradients("U", RANKS, NUMEL, seed=20 + op))
        assert members.suspects == set()
        for out, outcome in results:
            assert (outcome.delivered, outcome.missing) == (outcome.expected, set())
            np.testing.assert_array_equal(out, results[0][0])
        path.closing.pop()()


def test_who_hears_the_welcome_waits_for_the_rank_that_is_back() -> None:
    with sim_team(RANKS, hasty(width=64, ring_mib=1.0)) as job:
        for op in range(3):
            job.allreduce(gradients("U", RANKS, NUMEL, seed=op))
        job[0]._engine.died(BACK)
        job[0]._engine.welcome(BACK, job[BACK].step)
        results = job.allreduce(gradients("U", RANKS, NUMEL, seed=9), late={BACK: 20 * MS})
        assert all(outcome.missing == set() for _, outcome in results)

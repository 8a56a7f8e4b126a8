"""Whole all-reduces over udp in one process: events that nobody reads, closing, and failures of the transport."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import numpy as np
import pytest

from support import PATIENCE, Team, gradients, hasty, patient, team
from tailbound.collective.communicator import Communicator
from tailbound.datapath.udp import UdpDatapath

NUMEL = 8 * 64 * 256


def warm_up(job: Team, ops: int = 3, numel: int = NUMEL, ranks: list[int] | None = None) -> None:
    """Ops enough for warm scales and for predictions; one that a loaded machine spoils does not count."""
    whole = 0
    for op in range(20):
        if whole == ops:
            return
        results = job.allreduce(gradients("U", len(job), numel, seed=1000 + op), ranks)
        whole = whole + 1 if all(o.delivered == o.expected for _, o in results) else 0
    pytest.fail("never whole")


def seconds(communicator: Communicator) -> float:
    """How long an op may take here, on a machine that is busy with other things."""
    return communicator.config.bound / 1e9 + 2


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

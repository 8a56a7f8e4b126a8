"""At the start the log names the ranks that have not come, and the datapath of those that have."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict

import pytest

from support import MemoryStore, greeting, patient, team
from tailbound.errors import TransportError
from tailbound.transport import rendezvous
from tailbound.transport.rendezvous import exchange


@pytest.mark.parametrize(("rank", "level"), [(0, logging.WARNING), (4, logging.INFO)])
def test_ranks_that_have_not_called_register_are_named_before_time_is_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, level: int
) -> None:
    """By one of those that wait. Nothing was said for three minutes."""
    monkeypatch.setattr(rendezvous, "_NAMED", 0.05)
    store = MemoryStore()
    for one in (0, 4):
        store.set(f"job/greeting/{one}", json.dumps(asdict(greeting(one, ranks=8))))
    with caplog.at_level(logging.INFO, "tailbound"), pytest.raises(TransportError, match=r"within 0.2 s"):
        exchange(store, greeting(rank, ranks=8), "job", 0.2)
    words = "waits for ranks 1-3, 5-7 of 8: every rank of the group has to call register; timeout=0.2 seconds"
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(level, f"rank {rank} {words}")]


def test_rank_0_says_at_the_start_which_datapath_each_rank_has(caplog: pytest.LogCaptureFixture) -> None:
    with team(3, patient()):
        pass
    assert [r.getMessage() for r in caplog.records if "averages" in r.getMessage()] == [
        "tailbound averages gradients over udp on ranks 0-2"
    ]

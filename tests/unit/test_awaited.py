"""At the start the log names the ranks that have not come, and the datapath of those that have."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace

import pytest

from support import MemoryStore, patient, team
from tailbound.errors import TransportError
from tailbound.transport import rendezvous
from tailbound.transport.rendezvous import Greeting, exchange

_ONE = Greeting(
    rank=0, ranks=8, wire=1, version="0.1.0", address="10.0.0.0", port=5515, width=1408, rows=64, sum_rows=64,
    datapath="udp", model="abc", options={}, cookie=7,
)  # fmt: skip


def _greetings(*datapaths: str) -> list[Greeting]:
    return [replace(_ONE, rank=r, address=f"10.0.0.{r}", datapath=name) for r, name in enumerate(datapaths)]


@pytest.mark.parametrize(("rank", "level"), [(0, logging.WARNING), (4, logging.INFO)])
def test_ranks_that_have_not_called_register_are_named_before_time_is_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, level: int
) -> None:
    """By one of those that wait. Nothing was said for three minutes."""
    monkeypatch.setattr(rendezvous, "_NAMED", 0.05)
    store, all_of_them = MemoryStore(), _greetings(*["udp"] * 8)
    for one in all_of_them:
        if one.rank in (0, 4):
            store.set(f"job/greeting/{one.rank}", json.dumps(asdict(one)))
    with caplog.at_level(logging.INFO, "tailbound"), pytest.raises(TransportError, match=r"within 0.2 s"):
        exchange(store, all_of_them[rank], "job", 0.2)
    words = "waits for ranks 1-3, 5-7 of 8: every rank of the group has to call register; timeout=0.2 seconds"
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(level, f"rank {rank} {words}")]


def test_rank_0_says_at_the_start_which_datapath_each_rank_has(caplog: pytest.LogCaptureFixture) -> None:
    with team(3, patient()):
        pass
    assert [r.getMessage() for r in caplog.records if "averages" in r.getMessage()] == [
        "tailbound averages gradients over udp on ranks 0-2"
    ]

"""A peer of which nothing ever comes ends in an error; who falls silent later is a matter of suspicion."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from tailbound.collective.alerts import Ended, Unheard
from tailbound.wire.packets import DTYPES

S = 1_000_000_000


def job(**more: Any) -> Any:
    usual = {
        "rank": 0, "peers": [1, 2], "switch": None, "cookie": 7, "membership": SimpleNamespace(gone=set()),
        "sequence": SimpleNamespace(next_label=1024),
        "records": SimpleNamespace(peer_states=np.zeros(3, DTYPES["tb_peer_state"])),
    }  # fmt: skip
    return SimpleNamespace(**(usual | more))


def test_patience_begins_with_the_first_op_and_ends_in_one_error() -> None:
    one = job()
    unheard = Unheard(one, one.sequence, 10 * S)
    assert unheard.look(50 * S) is None
    one.sequence.next_label += 1
    assert unheard.look(100 * S) is None
    one.records.peer_states[1]["cookie"], one.records.peer_states[1]["newest"] = 7, 1024
    one.records.peer_states[2]["cookie"], one.records.peer_states[2]["newest"] = (
        7,
        1023,
    )  # a word of before the first op
    assert unheard.look(109 * S) is None
    error = unheard.look(110 * S)
    assert error is not None
    assert "rank 0: nothing has come from rank 2 since" in str(error)
    assert unheard.look(120 * S) is None


def test_who_said_goodbye_or_was_heard_once_is_no_error() -> None:
    one = job(membership=SimpleNamespace(gone={2}))
    one.records.peer_states[1]["cookie"], one.records.peer_states[1]["newest"] = 7, 5000
    for kind in (one, job(switch=3)):
        unheard = Unheard(kind, kind.sequence, 1 * S)
        kind.sequence.next_label += 1
        assert [unheard.look(second * S) for second in range(1, 9)] == [None] * 8


def test_a_program_that_is_taken_away_is_an_error_once() -> None:
    from types import SimpleNamespace

    from tailbound.collective.alerts import Withdrawn

    path = SimpleNamespace(interface="eth0", withdrawn=False)
    withdrawn = Withdrawn(path, 3)  # type: ignore[arg-type]
    assert withdrawn.look(1) is None
    path.withdrawn = True
    error = withdrawn.look(100 * S)
    assert error is not None
    assert "rank 3: the program on eth0 was detached or replaced" in str(error)
    assert withdrawn.look(200 * S) is None


def test_a_job_that_the_program_has_ended_is_told_once() -> None:
    """Rule: kernel-5."""
    known = SimpleNamespace(rank=3, store=SimpleNamespace(control={"active": [2]}))
    ended = Ended(known)  # type: ignore[arg-type]
    assert ended.look(1) is None
    known.store.control["active"] = [0]
    error = ended.look(100 * S)
    assert error is not None
    assert "rank 3: no packets are let in" in str(error)
    assert ended.look(200 * S) is None

"""A peer of which nothing ever comes ends in an error; who falls silent later is a matter of suspicion."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tailbound.collective.alerts import Unheard, Watch
from tailbound.wire.packets import DTYPES

S = 1_000_000_000


def job(**more: Any) -> Any:
    usual = {
        "rank": 0, "peers": [1, 2], "switch": None, "cookie": 7, "membership": SimpleNamespace(gone=set()),
        "sequence": SimpleNamespace(next_label=1024),
        "records": SimpleNamespace(peer_states=np.zeros(3, DTYPES["tb_peer_state"])),
    }  # fmt: skip
    return SimpleNamespace(**(usual | more))


def heard(one: Any, rank: int, newest: int) -> None:
    state = one.records.peer_states[rank]
    state["cookie"], state["newest"] = 7, newest


def test_patience_begins_with_the_first_op_and_ends_in_an_error() -> None:
    one = job()
    unheard = Unheard(one, one.sequence, 10 * S)
    assert unheard.check(50 * S) is None
    one.sequence.next_label += 1
    assert unheard.check(100 * S) is None
    heard(one, 1, 1024)
    heard(one, 2, 1023)  # a word of before the first op
    assert unheard.check(109 * S) is None
    error = unheard.check(110 * S)
    assert error is not None
    assert "rank 0: nothing has come from rank 2 since" in str(error)


def test_who_said_goodbye_or_was_heard_once_is_no_error() -> None:
    one = job(membership=SimpleNamespace(gone={2}))
    heard(one, 1, 5000)
    for kind in (one, job(switch=3)):
        unheard = Unheard(kind, kind.sequence, 1 * S)
        kind.sequence.next_label += 1
        assert [unheard.check(second * S) for second in range(1, 9)] == [None] * 8


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"withdrawn": True}, "the program on eth0 was detached or replaced"),
        ({"active": 0}, "no packets are let in any more"),
        ({"tagged": 0}, "another process has switched the check of tags off"),
    ],
)
def test_what_is_wrong_with_the_program_is_an_error(wrong: dict[str, int], text: str) -> None:
    """Rules: kernel-5, auth-2."""
    control = {"active": [2], "tagged": [1]}
    known = SimpleNamespace(rank=3, store=SimpleNamespace(control=control), armed=True)
    path = SimpleNamespace(interface="eth0", withdrawn=False)
    watching = Watch(known, path)  # type: ignore[arg-type]
    assert watching.check(1) is None
    path.withdrawn = bool(wrong.pop("withdrawn", False))
    control.update({name: [value] for name, value in wrong.items()})
    assert f"rank 3: {text}" in str(watching.check(100 * S))

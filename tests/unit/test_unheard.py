"""A peer of which nothing ever comes ends in an error; who falls silent later is a matter of suspicion."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support import MemoryStore, Trouble, assembled, hasty
from tailbound.collective.communicator import Communicator
from tailbound.collective.unheard import Unheard
from tailbound.errors import TransportError
from tailbound.transport.config import Config
from tailbound.wire.packets import DTYPES

S = 1_000_000_000


def job(**more: Any) -> Any:
    usual = {
        "rank": 0, "peers": [1, 2], "switch": None, "cookie": 7, "gone": set(),
        "sequence": SimpleNamespace(next_label=1024), "peer_states": np.zeros(3, DTYPES["tb_peer_state"]),
    }  # fmt: skip
    return SimpleNamespace(**(usual | more))


def test_patience_begins_with_the_first_op_and_ends_in_one_error() -> None:
    one = job()
    unheard = Unheard(one, 10 * S)
    assert unheard.look(50 * S) is None
    one.sequence.next_label += 1
    assert unheard.look(100 * S) is None
    one.peer_states[1]["cookie"], one.peer_states[1]["newest"] = 7, 1024
    one.peer_states[2]["cookie"], one.peer_states[2]["newest"] = 7, 1023  # a word of before the first op
    assert unheard.look(109 * S) is None
    error = unheard.look(110 * S)
    assert error is not None
    assert "rank 0: nothing has come from rank 2 since" in str(error)
    assert unheard.look(120 * S) is None


def test_who_said_goodbye_or_was_heard_once_is_no_error() -> None:
    one = job(gone={2})
    one.peer_states[1]["cookie"], one.peer_states[1]["newest"] = 7, 5000
    for kind in (one, job(switch=3)):
        unheard = Unheard(kind, 1 * S)
        kind.sequence.next_label += 1
        assert [unheard.look(second * S) for second in range(1, 9)] == [None] * 8


def test_a_rank_of_which_nothing_arrives_is_an_error_of_the_others() -> None:
    """One that only never steps still answers questions: it is suspected, and no error."""
    store = MemoryStore()

    def maker(rank: int) -> Any:
        return lambda: Communicator(store, Config(rank=rank, ranks=2, **hasty()), datapath="udp")

    with assembled([maker(0), maker(1)]) as both:
        both[0]._engine._unheard._patience = 3 * S  # what the start may take on a busy machine is another matter
        Trouble(seed=1, loss=1.0).attach(both[1])
        data = np.ones(1000, np.float32)

        def steps() -> None:
            for _ in range(200):
                outcome = both[0].allreduce(data.copy()).result(60)
                if outcome.error is not None:
                    raise outcome.error

        with pytest.raises(TransportError, match="rank 0: nothing has come from rank 1 since the first step"):
            steps()
        with pytest.raises(TransportError, match="nothing has come from rank 1"):
            both[0].allreduce(data)

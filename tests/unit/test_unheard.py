"""A peer of which nothing ever comes ends in an error; who falls silent later is a matter of suspicion."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tailbound.collective.alerts import Unheard, Watch
from tailbound.wire.packets import DTYPES

S = 1_000_000_000


@pytest.mark.parametrize(
    ("gone", "switch", "newest", "silent"),
    [
        (set(), None, 1024, False),
        (set(), None, 1023, True),  # a word of before the first op
        ({2}, None, 0, False),
        (set(), 3, 0, False),
    ],
)
def test_a_rank_that_is_never_heard_after_the_first_op_is_an_error(
    gone: set[int], switch: int | None, newest: int, silent: bool
) -> None:
    """Patience begins with the first op. Rank 1 is heard once, rank 2 says ``newest``."""
    states, sequence = np.zeros(3, DTYPES["tb_peer_state"]), SimpleNamespace(next_label=1024)
    known: Any = SimpleNamespace(rank=0, peers=[1, 2], switch=switch, cookie=7, membership=SimpleNamespace(gone=gone),
                                 records=SimpleNamespace(peer_states=states))  # fmt: skip
    unheard = Unheard(known, sequence, 10 * S)  # type: ignore[arg-type]
    assert unheard.check(50 * S) is None
    sequence.next_label += 1
    assert unheard.check(100 * S) is None
    states["cookie"], states["newest"] = 7, [0, 1024, newest]
    assert unheard.check(109 * S) is None
    error = unheard.check(110 * S)
    assert ("rank 0: nothing has come from rank 2 since" in str(error)) == silent
    assert (error is not None) == silent


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

"""When the leader of owner maps wants other exponents of tensors, and when it gives up (codec-18)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tailbound.codec.balance_table import NO_TABLE, Tables
from tailbound.codec.scale import NEED_LEAST
from tailbound.collective.balancing import Balancing
from tailbound.transport.config import MS

KEY = (0, 128, 0)
ENDS = np.array([64, 128])


@pytest.fixture
def job() -> Any:
    """As far as ``Balancing`` looks at it: one op a step."""
    made = SimpleNamespace(
        config=SimpleNamespace(first_step=0, balance=True), tables=Tables(), exponents={}, time=0,
        sequence=SimpleNamespace(stable=True, op_rows=(2,)),
    )  # fmt: skip
    made.now = lambda: made.time
    return made


def see(balancing: Balancing, ratio: float) -> None:
    """A step has been looked at, in which the second tensor was ``ratio`` times as large as the first."""
    balancing._known[KEY] = ENDS, np.log2([1.0, ratio])
    balancing._fresh = True


def test_a_wish_stays_until_it_is_settled(job: Any) -> None:
    balancing = Balancing(job)
    see(balancing, 1e3)
    first = balancing.look(NO_TABLE, 2)
    assert first != NO_TABLE
    see(balancing, 1e-3)
    assert balancing.look(NO_TABLE, 4) == first
    balancing.settled(first)
    assert balancing.look(first, 5) not in (first, NO_TABLE)


def test_a_wish_that_a_rank_cannot_get_is_given_up_for_a_while(job: Any) -> None:
    """Changes of owners are proposed with it, and would wait for it."""
    balancing = Balancing(job)
    see(balancing, 1e3)
    first = balancing.look(NO_TABLE, 2)
    job.time = 1001 * MS
    see(balancing, 1e3)
    assert balancing.look(NO_TABLE, 8) == NO_TABLE
    assert not job.tables.knows(first)
    job.time = 11_000 * MS
    assert balancing.look(NO_TABLE, 9) == NO_TABLE
    job.time = 11_002 * MS
    assert balancing.look(NO_TABLE, 10) == first


def test_a_table_that_a_map_has_is_not_forgotten(job: Any) -> None:
    balancing = Balancing(job)
    see(balancing, 1e3)
    first = balancing.look(NO_TABLE, 2)
    balancing.settled(first)
    see(balancing, 1e-3)
    balancing.settled(balancing.look(first, 4))
    see(balancing, 1e3)
    assert balancing.look(NO_TABLE, 6) == first
    job.time = 1001 * MS
    assert balancing.look(NO_TABLE, 8) == NO_TABLE
    assert job.tables.knows(first)


def test_changes_become_rare(job: Any) -> None:
    """They make ops cold. A tensor that changes for good and all has its exponents in time all the same."""
    balancing, present, changes = Balancing(job), NO_TABLE, []
    for step in range(5000):
        see(balancing, 1e3 if step % 2 else 1e-3)
        wish = balancing.look(present, step)
        if wish != present:
            changes.append(step)
            balancing.settled(wish)
            present = wish
    late = np.diff([step for step in changes if step >= 40])
    assert len(late) < 20
    assert (late[1:] >= late[:-1]).all()
    assert late[-1] >= 512


def test_groups_without_values_are_no_jump(job: Any) -> None:
    balancing = Balancing(job)
    op: Any = SimpleNamespace(key=(*KEY, 0))

    def jumped(*scales: int) -> bool:
        job.exponents[op.key] = np.array(scales, np.int16)
        return balancing._jumped(op)

    assert not jumped(NEED_LEAST, -20)
    assert not jumped(-10, -20)
    assert not jumped(-3, -20)
    assert jumped(-3, -12)
    assert not jumped(-3, -32768)
    assert not jumped(-3, -12)

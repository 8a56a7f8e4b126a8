"""When the leader of owner maps wants other exponents of tensors, and when it gives up (codec-18)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tailbound.codec.balance_table import NO_TABLE, Entry, Tables
from tailbound.codec.exponents import rounded, wanted
from tailbound.codec.scale import NEED_LEAST
from tailbound.collective.balancing import Balancing
from tailbound.transport.config import MS
from tailbound.transport.steps import STEP_MASK

KEY, NUMEL = (0, 128, 0), 128
ENDS = np.array([64, NUMEL])
#: The ops of a step.
LAYOUTS = (SimpleNamespace(key=(*KEY, 33), shape=SimpleNamespace(numel=NUMEL)),)


@pytest.fixture
def job() -> Any:
    """As far as ``Balancing`` looks at it: one op a step."""
    made = SimpleNamespace(
        config=SimpleNamespace(first_step=0, balance=True), tables=Tables(), exponents={}, time=0,
        sequence=SimpleNamespace(stable=True, op_rows=(2,), layouts=LAYOUTS),
    )  # fmt: skip
    made.now = lambda: made.time
    return made


def see(balancing: Balancing, ratio: float) -> None:
    """A step has been looked at, in which the second tensor was ``ratio`` times as large as the first."""
    before = balancing._job.tables.mark(balancing._present, KEY, NUMEL)
    exponents = rounded(wanted(np.log2([1.0, ratio]), ENDS))
    balancing._better[KEY] = Entry(ENDS, exponents, before, 33, np.zeros(1, np.int16))


def test_a_wish_stays_until_it_is_settled(job: Any) -> None:
    balancing = Balancing(job)
    see(balancing, 1e3)
    first = balancing.look(NO_TABLE, 2)
    assert first != NO_TABLE
    see(balancing, 1e-3)
    assert balancing.look(NO_TABLE, 4) == first
    balancing.settled(first)
    see(balancing, 1e-3)
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


def test_ops_that_are_no_more_leave_the_table_and_others_keep_their_marks(job: Any) -> None:
    balancing, other = Balancing(job), (1, 50, 0)
    job.sequence.layouts += (SimpleNamespace(key=(*other, 33), shape=SimpleNamespace(numel=50)),)
    see(balancing, 1e3)
    first = balancing.look(NO_TABLE, 2)
    mark = job.tables.mark(first, KEY, NUMEL)
    balancing.settled(first)
    balancing._better[other] = Entry(np.array([50]), np.array([0], np.uint8), NO_TABLE, 33, np.zeros(1, np.int16))
    second = balancing.look(first, 4)
    assert job.tables.mark(second, KEY, NUMEL) == mark
    balancing.settled(second)
    job.sequence.layouts = job.sequence.layouts[:1]
    see(balancing, 1e-3)
    third = balancing.look(second, 6)
    assert set(job.tables.table(third).ops) == {KEY}


def test_changes_become_rare(job: Any) -> None:
    """A tensor that changes for good and all has its exponents in time all the same."""
    balancing, present, changes = Balancing(job), NO_TABLE, []
    for step in range(5000):
        see(balancing, 1e3 if step % 2 else 1e-3)
        wish = balancing.look(present, step)
        if wish != present:
            changes.append(step)
            balancing.settled(wish)
            present = wish
    late = np.diff([step for step in changes if step >= 60])
    assert len(late) < 20
    assert (late[1:] >= late[:-1]).all()
    assert late[-1] >= 512


def test_ops_of_large_models_take_turns(job: Any) -> None:
    """So that no step has more to look at than about one op of the largest size."""
    balancing, job.sequence.op_rows = Balancing(job), (8000,) * 11
    seen = [[index for index in range(11) if balancing._due(step, index)] for step in range(44)]
    assert max(map(len, seen)) <= 2
    assert sorted(itertools.chain(*seen[:11])) == list(range(11))
    job.sequence.op_rows = (100, 100)
    assert all(balancing._due(step, 1) for step in range(4))
    balancing.look(NO_TABLE, 60)
    assert [balancing._due(60 + step, 1) for step in range(8)] == [True, False, False, False] * 2
    balancing._least = 64

    def due(step: int) -> bool:
        balancing.look(NO_TABLE, step)
        return balancing._due(step, 0)

    assert not any(due(step) for step in range(61, 108))
    assert due(108)


@pytest.mark.parametrize("first_step", [7, (1 << 22) - 70])
def test_a_job_is_young_once(job: Any, first_step: int) -> None:
    """Numbers of steps wrap at 2^22, and distances change their sign at 2^21."""
    job.config.first_step = first_step
    balancing, looked = Balancing(job), []
    for since in [*range(200), *range(200, 1 << 23, 997)]:
        balancing.look(NO_TABLE, (first_step + since) & STEP_MASK)
        looked.append(not balancing._old)
    assert looked == [True] * 60 + [False] * (len(looked) - 60)
    balancing._least = 512
    see(balancing, 1e3)
    assert balancing.look(NO_TABLE, (first_step + since) & STEP_MASK) != NO_TABLE  # ages without a wish are long enough


def test_a_step_counts_the_less_the_older_a_model_is(job: Any) -> None:
    """One that jumps counts alone once the model is older; ops that take turns count with all steps of theirs."""
    job.config.first_step = 7
    balancing = Balancing(job)
    for age, share in ((1, 1.0), (10, 1.0), (20, 0.5), (25, 0.4), (40, 0.25), (60, 0.25), (61, 0.5)):
        balancing.look(NO_TABLE, 6 + age)
        assert balancing._share(False) == pytest.approx(share)
    assert balancing._share(True) == 1.0
    job.sequence.op_rows, balancing = (8000,) * 2, Balancing(job)
    balancing.look(NO_TABLE, 26)
    assert balancing._share(False) == 0.75


def test_sizes_are_noted_while_other_exponents_are_on_their_way(job: Any) -> None:
    job.exponents[(*KEY, 33)] = np.array([0], np.int16)
    balancing, powers = Balancing(job), np.array([1.0, 1e-6])
    balancing.leads = True
    see(balancing, 1e3)
    assert balancing.look(NO_TABLE, 0) != NO_TABLE
    whole = SimpleNamespace(failed_groups=0, void=False, skipped=False, error=None)
    launch = SimpleNamespace(starts=(0, 64), first=0, out=None, coder=SimpleNamespace(powers=lambda *_: powers))
    layout = SimpleNamespace(shape=SimpleNamespace(numel=NUMEL))
    for step in range(3):
        place = SimpleNamespace(step=step, index=0, layout=layout)
        balancing.observe(
            SimpleNamespace(place=place, launch=launch, outcome=whole, key=(*KEY, 33), balance=NO_TABLE)  # type: ignore[arg-type]
        )
    assert balancing._known[KEY][1].tolist() == np.log2([1.0, 1e-3]).tolist()
    assert not balancing._better


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

"""The kernel program with mends taken back, one at a time: what they mended is found again.

The program's own sources, copied, with a line of each mend changed. A line that is not there any more is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from interleave.explorer import EVERY_DAY, Walker
from interleave.judged import check_in_pieces, check_kinds, needs_pieces
from interleave.kernel import KernelTables
from interleave.pairing import check, pairs_of
from interleave.pairs import ROWS, PairTables
from kernel_world import KernelWorld
from soak import worker
from soak.life import live

#: One loader is enough to see that tests can fail.
LOADER = "clang"
pytestmark = pytest.mark.needs("bpf", "clang", "libbpf")

Change = tuple[str, str, str]
_AHEAD = "	return tb_distance(op, TB_READ_ONCE(control->released)) > TB_OP_STEPS"
_GONE = "	if (p->type == TB_TYPE_RESULT)\n		return TB_GO_ON;\n	return p->type == TB_TYPE_CONTRIBUTION ?"
_WRONG = "		if (expected && exponent == expect.exponent && exponent != slot->exponent)"
_PRESENT = "		tb_store_release(present, here.word);\n"
_COUNT = "	in = tb_op_result_in(op, p);\n"
#: Between the two locks this CPU is held up for a moment.
_HELD_UP = "	for (rows = 0; rows < 256; rows++)\n		TB_READ_ONCE(control->active);\n"

IN_PIECES: list[Change] = [
    ("ebpf/parse.h", "		if (start && tb_names_us(", "		if (0 && start && tb_names_us("),
]
FAR_LABELS: list[Change] = [
    ("ebpf/op.h", _AHEAD, _AHEAD.replace("return ", "return 0 && ")),
    ("xdp_programs/ingest.h", _GONE, _GONE[_GONE.index("	return p->type") :]),
]
WRONG_SCALE: list[Change] = [("ebpf/slot.h", _WRONG, _WRONG.replace("(expected", "(0 && expected"))]
TWO_LOCKS: list[Change] = [
    ("xdp_programs/ingest.h", _PRESENT, ""),
    ("xdp_programs/ingest.h", _COUNT, _HELD_UP + _PRESENT[1:] + _COUNT),
]
NOT_TAKEN_AWAY: list[Change] = [
    ("xdp_programs/ingest.h", "				tb_pass_undo(sums, f.codes, f.end, rounds);\n", "")
]
_OVER = "tb_distance(op, TB_READ_ONCE(control->released)) <= 0;"
OVER_ANY_OLDER: list[Change] = [("ebpf/window.h", _OVER, _OVER.replace("<= 0", "<= 1 << 20"))]


@pytest.fixture
def tables(take_back: Callable[[list[Change]], None], request: pytest.FixtureRequest) -> Iterator[KernelTables]:
    """Of the program without the mend that the test names."""
    take_back(request.param)
    world = KernelWorld(LOADER)
    yield KernelTables(world, Walker().tables.layout)
    world.close()


@pytest.mark.parametrize("tables", [IN_PIECES], ids=["frames in pieces"], indirect=True)
def test_uncounted_rows_are_found(tables: KernelTables) -> None:
    """Frames whose first piece was short passed as somebody else's, and no ledger had them (kernel-21)."""
    with needs_pieces(), pytest.raises(AssertionError, match="in pieces: counted as"):
        check_in_pieces(tables)


@pytest.mark.parametrize(
    ("tables", "scenes"),
    [(FAR_LABELS, ("records", "results")), (WRONG_SCALE, ("sums",))],
    ids=["labels from far ahead, and results without a record", "a stale exponent"],
    indirect=["tables"],
)
def test_another_verdict_is_found(tables: KernelTables, scenes: tuple[str, ...]) -> None:
    """Rules: kernel-14, kernel-16, kernel-17."""
    for scene in scenes:
        with pytest.raises(AssertionError, match="the kernel"):
            check_kinds(tables, scene, EVERY_DAY[scene])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="missing capability 'two CPUs'")
def test_a_row_that_nobody_sees_is_found(take_back: Callable[[list[Change]], None]) -> None:
    """Between the row's lock and that of presence another CPU is told that the row is there (kernel-17)."""
    take_back(TWO_LOCKS)
    world = KernelWorld(LOADER, source="", sum_rows=ROWS, result_rows=ROWS)
    made = PairTables(world, LOADER, Walker().tables.layout)
    try:
        with pytest.raises(AssertionError, match="nobody sees the row"):
            check(made, pairs_of("results", 20, 20), [(delay, 0) for delay in range(0, 200, 10)])
    finally:
        made.close()
        world.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [(NOT_TAKEN_AWAY, ("REFUSED_AND_SUMMED", "REFUSED_AND_SHOWN")), (OVER_ANY_OLDER, "VERDICTS_DIFFER")],
    ids=["wrong codes stay in a sum", "a row in progress is stored over"],
)
def test_wrong_codes_are_found(
    take_back: Callable[[list[Change]], None], changes: list[Change], words: str | tuple[str, ...]
) -> None:
    """A soak tells codes where somebody may read them from those where nobody does (kernel-9)."""
    take_back(changes)
    cpus = os.sched_getaffinity(0)
    twins = worker.Twins(LOADER)
    try:
        found = next((said for seed in range(40) if (said := live(twins, seed).words)), "")
    finally:
        twins.close()
        os.sched_setaffinity(0, cpus)
    assert found.startswith(words)

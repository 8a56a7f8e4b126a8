"""Results are counted in their op's record without its lock, by an addition to a word that says what it counts.

Rules: kernel-17.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import cases
from kernel_world import KernelWorld
from tailbound.wire.schema import OP_INDEX_BITS, OP_STEPS, Verdict, op_slot

_LOOK = "	if (was.tag != tag)\n		return 0;\n"
#: An op whose record would lie where that of the cases lies.
OTHER = cases.OP + (OP_STEPS << OP_INDEX_BITS)


@pytest.mark.needs("bpf", "clang", "libbpf")
def test_what_was_counted_in_another_ops_record_is_taken_back(
    take_back: Callable[[list[tuple[str, str, str]]], None],
) -> None:
    """The record becomes another op's between look and addition: the look is left out."""
    take_back([("ebpf/op.h", _LOOK, "")])
    world = KernelWorld("clang")
    try:
        assert world.take(cases.result(1))[0] == Verdict.RESULT_TAKEN
        record = world.store.ops[op_slot(OTHER)]
        before = record.tobytes()
        assert (record["op"], record["results_in"]) == (cases.OP, 1)
        assert world.take(cases.result(2, op=OTHER, seq=cases.RESULT_SEQ + 1))[0] == Verdict.RESULT_TAKEN
        assert record.tobytes() == before
    finally:
        world.close()

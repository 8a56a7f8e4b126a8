"""What a window says of ops that are over, and in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from tailbound.codec.owners import OwnerMap
from tailbound.collective.op import Phase
from tailbound.collective.window import Window


class Written(dict[str, Any]):
    """A control record that remembers in which order its fields are written."""

    def __init__(self) -> None:
        super().__init__({name: np.zeros(1, np.uint32) for name in ("released", "result_base", "sum_base", "first_op")})
        self.order: list[str] = []

    def __setitem__(self, name: str, value: Any) -> None:
        self.order.append(name)
        super().__setitem__(name, np.full(1, value, np.uint32))


def window(control: Written) -> tuple[Window, Any]:
    """The window of rank 0 of two, and its job."""
    job: Any = SimpleNamespace(
        turn_keys=lambda step, turns: None,
        rank=0,
        sequence=SimpleNamespace(next_label=6, jump=lambda to: None, map=OwnerMap(0, (0, 1))),
        marks=SimpleNamespace(contributed=5, published=4, told=5),
        ranks=2,
        store=SimpleNamespace(control=control, result_rows=64),
    )
    queue: Any = SimpleNamespace(cancel=lambda label: 0)
    running: Any = SimpleNamespace(remove=lambda op: None)
    return Window(job, queue, lambda op: None, running), job


def test_the_published_mark_of_an_op_rises_before_it_is_let_go() -> None:
    """Its last results may leave together with answers, when all ops of the turn have been moved on.

    Without the mark others asked for it in vain, and waited for as long as they wait past deadlines.

    Rules: clock-7b, clock-19.
    """
    held, job = window(Written())
    place = SimpleNamespace(
        label=5, step=0, result_seq=8, sum_seqs=[4, 4], layout=SimpleNamespace(shape=SimpleNamespace(rows=4)),
        placement=SimpleNamespace(counts=np.array([2, 2]), shares=[2, 2], owner_map=SimpleNamespace(turns=0)),
    )  # fmt: skip
    held.pool = SimpleNamespace(keep=lambda place, buffers: None)  # type: ignore[assignment]
    through = SimpleNamespace(phase=Phase.DONE)
    held.ops[5] = SimpleNamespace(label=5, first=through, second=through, place=place, start=1, buffers=None)  # type: ignore[assignment]
    assert held.release()
    assert (held.ops, job.marks.published) == ({}, 5)


def test_what_is_over_is_said_before_its_place_is_given_to_others() -> None:
    """Else rows that are right would be refused: a row of an op in progress is not stored over (kernel-16)."""
    held, job = window(Written())
    held.jump(SimpleNamespace(step=3, result_seq=100, sum_seqs=[50, 60]))  # type: ignore[arg-type]
    assert job.store.control.order[:3] == ["released", "result_base", "sum_base"]

"""In which order a window lets go. That it acknowledges before: ``sim.engine``, after every turn (clock-19)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from tailbound.collective.window import Window


class Written(dict[str, Any]):
    """A control record that remembers in which order its fields are written."""

    def __init__(self) -> None:
        super().__init__({name: np.zeros(1, np.uint32) for name in ("released", "result_base", "sum_base", "first_op")})
        self.order: list[str] = []

    def __setitem__(self, name: str, value: Any) -> None:
        self.order.append(name)
        super().__setitem__(name, np.full(1, value, np.uint32))


def test_what_is_over_is_said_before_its_place_is_given_to_others() -> None:
    """Else rows that are right would be refused: a row of an op in progress is not stored over (kernel-16)."""
    control = Written()
    job: Any = SimpleNamespace(
        turn_keys=lambda step, turns: None,
        rank=0,
        sequence=SimpleNamespace(next_label=6, jump=lambda to: None),
        marks=SimpleNamespace(contributed=5, published=4, told=5),
        ranks=2,
        store=SimpleNamespace(control=control, result_rows=64),
    )
    queue: Any = SimpleNamespace(cancel=lambda label: 0)
    running: Any = SimpleNamespace(remove=lambda op: None)
    window = Window(job, queue, lambda op: None, running)
    window.jump(SimpleNamespace(step=3, turns=0, result_seq=100, sum_seqs=[50, 60]))  # type: ignore[arg-type]
    assert control.order[:3] == ["released", "result_base", "sum_base"]

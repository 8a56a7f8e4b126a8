"""What the lab says at the end of a run with faults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailbound_lab.lab import inject
from tailbound_lab.lab.faults import Fault


def test_a_packet_between_two_workers_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both cables saw it, and 5 % of loss were told as 2.58 %."""

    class Program:
        def attach(self, *_: object) -> None: ...

        def set(self, _: object) -> None: ...

        def counts(self) -> dict[str, int]:
            return {"seen": 1000, "lost": 25}

    monkeypatch.setattr(inject, "FaultProgram", Program)
    monkeypatch.setattr(inject.namespaces, "call", lambda *_, **__: None)
    topology: Any = SimpleNamespace(
        cables=[SimpleNamespace(rank=rank) for rank in range(2)], cable_ends=lambda *_: [("", ""), ("", "")]
    )
    made = inject.Injector(topology, Fault(loss=0.05), 1)
    assert str(made.counts(link=inject.LINKS[0])) == (
        "of 2000 packets 100 lost (5.00 %); 0 duplicated, 0 corrupted, 0 reordered"
    )

"""The table of states in ``docs/torch/cluster.md``: every transition in it has a test that says so (clock-20)."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.needs("torch")


def test_every_transition_has_a_test(repository: Path) -> None:
    """A test says ``States: in step to behind, behind to in step.`` in its docstring."""
    page = (repository / "docs/torch/cluster.md").read_text()
    section = page.split("## States of a rank")[1].split("\n## ")[0]
    rows = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in section.splitlines() if "|" in line]
    said: set[tuple[str, ...]] = set()
    for path in (repository / "tests").rglob("test_*.py"):
        for words in re.findall(r"States: ([a-z, ]+)\.", path.read_text()):
            said |= {tuple(each.split(" to ")) for each in words.split(", ")}
    assert set(rows[2:]) == said


def rank(**communicator: Any) -> Any:
    from tailbound.torch.recovery import Recovery

    made: Any = Recovery(0, 3, (0, 0.0))
    made.communicator = SimpleNamespace(**{"lost": False, "behind": 0, **communicator})
    return made


def test_a_rank_is_in_one_place() -> None:
    """States: in step to behind, behind to lost, lost to void, void to in step."""
    from tailbound.torch.recovery import Place

    one = rank()
    assert one.place is Place.IN_STEP
    one.communicator.behind = 2
    assert one.place is Place.BEHIND
    one.communicator.lost = True
    assert one.place is Place.LOST
    one.void.on = True
    assert one.place is Place.VOID
    one.void.on = one.communicator.lost = False
    one.communicator.behind = 0
    assert one.place is Place.IN_STEP
    one.void.on, one.entrance = True, SimpleNamespace(outside=True)
    assert one.place is Place.OUTSIDE
    one.communicator = None
    assert one.place is Place.IN_STEP


def test_a_rank_abstains_until_it_is_sound() -> None:
    """States: abstaining to contributing."""
    one = rank()
    one.resync = SimpleNamespace(
        sound=False, boundary=lambda step, still: None, replica=SimpleNamespace(optimizers=[SimpleNamespace(state={})])
    )
    one.abstaining = True
    for sound in (False, True):
        one.ended, one.stepped, one.resync.sound = 3, True, sound
        one.end_step(still=True)
        assert one.abstaining is not sound

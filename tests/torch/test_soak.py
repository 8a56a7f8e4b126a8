"""The third part of ``make soak``: a life passes, and replicas that part are told, with the step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.needs("torch")


def _result(**values: Any) -> dict[str, Any]:
    seen = dict.fromkeys(range(4), ("same", True))
    return {"seen": seen, "first": "new", "digest": "end", "synchronized": True, "last": 4} | values


def test_what_is_wrong_with_a_life_is_told_in_words() -> None:
    from soak.training import complaints

    unlike = {step: ("other" if step >= 2 else "same", True) for step in range(4)}
    unsound = dict.fromkeys(range(4), ("other", False))
    assert complaints({0: _result(), 1: _result(seen=unsound), 3: _result()}, "new") == []
    assert complaints({0: _result()}, "old") == ["a rank began with something else than the checkpoint"]
    (parted,) = complaints({0: _result(), 1: _result(seen=unlike)})
    assert parted == "parted before step 2 although sound: {0: 'same', 1: 'other'}"
    (unlike_in_the_end,) = complaints({0: _result(), 1: _result(digest="apart")})
    assert unlike_in_the_end == "synchronized and unlike: {0: 'end', 1: 'apart'}"
    (not_synchronized,) = complaints({0: _result(), 1: _result(synchronized=False, digest="apart")})
    assert not_synchronized == "not synchronized: {0: (True, 4), 1: (False, 4)}"


def test_a_life_with_a_replica_that_changes_unseen(tmp_path: Path) -> None:
    """All ranks hold the same in the end, since they synchronize; but one has parted, and from which step is known."""
    from soak.training import life

    counts: Counter[str] = Counter()
    wrong, digest = life(4, tmp_path, 0.5, lambda name, number: counts.update({name: number}), spoilt=1)
    assert counts["lives"] == 1
    assert digest
    assert len(wrong) == 1
    assert wrong[0].startswith("parted before step 1 although sound: {0: ")

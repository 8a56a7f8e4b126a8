"""The third part of ``make soak``: a life passes, and replicas that part are told, with the step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.needs("torch")


_SEEN = dict.fromkeys(range(4), ("same", True))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"seen": dict.fromkeys(range(4), ("other", False))}, None),
        ({"first": "old"}, "a rank began with something else than the checkpoint"),
        ({"seen": _SEEN | {2: ("other", True)}}, "parted before step 2 although sound: {0: 'same', 1: 'other'}"),
        ({"digest": "apart"}, "synchronized and unlike: {0: 'end', 1: 'apart'}"),
        ({"synchronized": False}, "not synchronized: {0: (True, 4), 1: (False, 4)}"),
    ],
)
def test_what_is_wrong_with_a_life_is_told_in_words(other: dict[str, Any], words: str | None) -> None:
    from soak.training import complaints

    well = {"seen": _SEEN, "first": "new", "digest": "end", "synchronized": True, "last": 4}
    assert complaints({0: well, 1: well | other}, "new") == ([words] if words else [])


def test_a_life_with_a_replica_that_changes_unseen(tmp_path: Path) -> None:
    """All ranks hold the same in the end, since they synchronize; but one has parted, and from which step is known."""
    from soak.training import life

    counts: Counter[str] = Counter()
    wrong, digest = life(4, tmp_path, 0.5, lambda name, number: counts.update({name: number}), spoilt=1)
    assert counts["lives"] == 1
    assert digest
    assert len(wrong) == 1
    assert wrong[0].startswith("parted before step 1 although sound: {0: ")

"""All orders of contribution, result, READY, seal, window and live set in the udp datapath's own tables.

Rules: kernel-12, kernel-14, kernel-15, kernel-16, kernel-17, kernel-19, kernel-21.
"""

from __future__ import annotations

from functools import partial

import pytest

from interleave.explorer import EVERY_DAY, Broken, Walker, explore, explored, replay
from interleave.scene import SCENES
from interleave.taken_back import COUNTED, FAR_LABELS, TWO_LOCKS, UNMOVED, defective
from tailbound.wire.schema import Verdict

#: With ``--thorough``: more than there are of two scenes (about 14,000 and 25,000), and a part of the others.
THOROUGH = {"sums": 100_000, "records": 100_000, "results": 60_000, "all": 20_000}
WHOLE = ("sums", "records")


@pytest.mark.parametrize("scene", SCENES)
def test_every_order(scene: str) -> None:
    found = explored(scene, EVERY_DAY[scene])
    assert found.whole or len(found.states) > EVERY_DAY[scene]
    taken = {verdict for _, verdict, *_ in found.kinds}
    assert Verdict.STORED in taken or Verdict.RESULT_TAKEN in taken


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scene", SCENES)
def test_every_order_further(scene: str) -> None:
    assert explore(scene, THOROUGH[scene]).whole or scene not in WHOLE


def test_a_life_of_two_ops() -> None:
    """Actions by name, as a failure prints them: a whole turn of the rings. With a packet comes its verdict."""
    life = [
        ("1 gives A by another scale", Verdict.STORED), ("2 gives A", Verdict.ADDED),
        ("1 gives A", Verdict.DUPLICATE), ("3 gives A", Verdict.ADDED), ("seal A", None), ("3 repeats A", Verdict.LATE),
        ("result of A by 2", Verdict.RESULT_TAKEN), ("1 gives B", Verdict.FUTURE_OP), ("released", None),
        ("results move on", None), ("sums move on", None), ("1 gives B", Verdict.STORED),
        ("result of A by 1", Verdict.STALE_RESULT), ("result of B by 1", Verdict.RESULT_TAKEN),
    ]  # fmt: skip
    assert list(replay([action for action, _ in life])) == [verdict for _, verdict in life]


@pytest.fixture(scope="module")
def walkers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Walker]:
    return defective(tmp_path_factory.mktemp("taken_back"))


#: Mend, scene in which its lack is seen, and the first of the shortest ways to see it.
TAKEN_BACK = {
    "labels from far ahead": (FAR_LABELS, "records", ("1 gives A", "1 is ready for C")),
    "a larger scale": (UNMOVED, "sums", ("1 gives A", "2 gives A by another scale")),
    "presence under another lock": (TWO_LOCKS, "results", ("result of A by 1",)),
    # others that are seen by these actions
    "a result without a record": (FAR_LABELS, None, ("3 is ready for C", "result of A by 1")),
    "a row that was counted": (COUNTED, None, ("1 gives A", "3 is out", "2 gives A", "3 gives A")),
}  # fmt: skip


@pytest.mark.parametrize(("mend", "scene", "actions"), TAKEN_BACK.values(), ids=TAKEN_BACK)
def test_found_again(walkers: dict[int, Walker], mend: int, scene: str | None, actions: tuple[str, ...]) -> None:
    """What was mended is found again where the mend is taken back; with all mends the same sequence is sound."""
    walker = walkers[mend]
    look = partial(explore, scene, EVERY_DAY[scene], walker) if scene else partial(replay, actions, walker)
    with pytest.raises(Broken) as broken:
        look()
    assert scene is None or broken.value.actions == actions, broken.value
    replay(actions, walkers[0])

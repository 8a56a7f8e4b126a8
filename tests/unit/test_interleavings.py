"""All orders of contribution, result, READY, seal, window and live set in the udp datapath's own tables.

Rules: kernel-12, kernel-14, kernel-15, kernel-16, kernel-17, kernel-19, kernel-21.
"""

from __future__ import annotations

import pytest

from interleave.explorer import EVERY_DAY, Broken, Walker, explore, explored, replay
from interleave.scene import SCENES
from interleave.taken_back import COUNTED, FAR_LABELS, TWO_LOCKS, WRONG_SCALE, defective
from tailbound.wire.schema import Verdict

#: With ``--thorough``: more than there are of two scenes (about 31,000 and 25,000), and a part of the others.
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
    """Actions by name, as a failure prints them: a whole turn of the rings."""
    verdicts = replay(
        [
            "1 gives A by another scale",
            "tell A",
            "2 gives A",
            "1 gives A",
            "3 gives A",
            "seal A",
            "3 repeats A",
            "result of A by 2",
            "1 gives B",
            "released",
            "results move on",
            "sums move on",
            "1 gives B",
            "result of A by 1",
            "result of B by 1",
        ]
    )
    packets = [verdict for verdict in verdicts if verdict is not None]
    assert packets == [
        Verdict.STORED,
        Verdict.STORED,
        Verdict.ADDED,
        Verdict.ADDED,
        Verdict.LATE,
        Verdict.RESULT_TAKEN,
        Verdict.FUTURE_OP,
        Verdict.STORED,
        Verdict.STALE_RESULT,
        Verdict.RESULT_TAKEN,
    ]


@pytest.fixture(scope="module")
def walkers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Walker]:
    return defective(tmp_path_factory.mktemp("taken_back"))


#: Mend, scene in which its lack is seen, and the first of the shortest ways to see it.
TAKEN_BACK = {
    "labels from far ahead": (FAR_LABELS, "records", ("1 gives A", "1 is ready for C")),
    "a stale exponent": (WRONG_SCALE, "sums", ("1 gives A by another scale", "tell A", "1 gives A")),
    "presence under another lock": (TWO_LOCKS, "results", ("result of A by 1",)),
}


@pytest.mark.parametrize(("mend", "scene", "fewest"), TAKEN_BACK.values(), ids=TAKEN_BACK)
def test_found_again(walkers: dict[int, Walker], mend: int, scene: str, fewest: tuple[str, ...]) -> None:
    """What was mended is found again where the mend is taken back; with all mends the same sequence is sound."""
    with pytest.raises(Broken) as broken:
        explore(scene, EVERY_DAY[scene], walkers[mend])
    assert broken.value.actions == fewest, broken.value
    replay(fewest, walkers[0])


#: Other sequences in which the lack of a mend is seen.
ALSO = {
    "a result without a record": (FAR_LABELS, ("3 is ready for C", "result of A by 1")),
    "a scale that all others have": (WRONG_SCALE, ("1 gives A by another scale", "tell A", "2 gives A")),
    "a row that was not counted": (
        COUNTED,
        ("1 gives A by another scale", "2 gives A by another scale", "3 is out", "tell A", "1 gives A"),
    ),
}


@pytest.mark.parametrize(("mend", "actions"), ALSO.values(), ids=ALSO)
def test_found_again_by_replay(walkers: dict[int, Walker], mend: int, actions: tuple[str, ...]) -> None:
    with pytest.raises(Broken):
        replay(actions, walkers[mend])
    replay(actions, walkers[0])

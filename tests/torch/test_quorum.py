"""Ranks that hear no majority train nothing, and models that go back to plain DDP: real processes over udp.

Which ops are void is tested in virtual time (``sim/test_quorum``).
"""

from __future__ import annotations

import pytest

from processes import Run

pytestmark = pytest.mark.needs("torch")


@pytest.mark.parametrize(
    ("ranks", "part", "train", "steps"),
    [(4, {3}, {0, 1, 2}, 150), (3, {0}, {1, 2}, 150), (2, {0}, set(), 40), (4, {0, 1}, set(), 40)],
    ids=["one of four", "one of three", "one of two", "halves"],
)
def test_who_is_cut_off_trains_nothing_until_it_is_back(
    run: Run, ranks: int, part: set[int], train: set[int], steps: int
) -> None:
    """Weights, momentum and the count of steps stay; the loss scale sees no overflow. Rule: clock-38."""
    results = run("quorum_jobs.cut", ranks, part, steps)
    for rank, one in enumerate(results):
        assert len(one["held"]) > 1, rank
        assert (len(set(one["held"])) > 1) == (rank in train), rank
        if rank not in train:
            assert one["void"], rank
            assert one["events"]["no_quorum"] == one["events"]["quorum"] == 1, rank
    assert all(one["well"] for one in results)
    assert len({one["end"] for one in results}) == 1
    assert {one["scale"] for one in results} == {2.0**16}


def test_a_model_that_is_detached_goes_on_as_plain_ddp(run: Run) -> None:
    """Gradients are the exact mean of all ranks; nothing is sent any more, and calls that need the job say so."""
    for one in run("quorum_jobs.detached", 3):
        assert one["well"]
        assert len(one["apart"]) == 5
        assert max(one["apart"]) < 1e-6
        assert one["ran"] == 0
        assert len(set(one["held"])) == 1
        assert set(one["scales"]) == {2.0**16}

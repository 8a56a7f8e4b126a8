"""FSDP2 with Tailbound between the replicas, in real processes, against plain HSDP and DDP over Gloo."""

from __future__ import annotations

import pytest

from processes import Run

pytestmark = pytest.mark.needs("torch")


def test_gradients_are_those_of_plain_hsdp_and_of_ddp(run: Run) -> None:
    """In float32 and in mixed precision of three kinds, and with other codes than u8."""
    for found in run("fsdp_jobs.parity", 4):
        # three modules a step, and once an op that ends the first one
        assert list(found.values()) == [{"steps": 3, "ops": 3 * 3 + 1, "delivered": 1.0}] * 5


def test_steps_end_whatever_modules_a_pass_goes_through(run: Run) -> None:
    for steps in run("fsdp_jobs.passes", 4):
        assert steps == [1, 2, 3, 4, 5, 6, 7]


def test_averages_are_awaited_at_the_end_of_backward_unless_somebody_sees_gradients_before(run: Run) -> None:

    in_turn = ["launch 2", "wait 2", "launch 0", "wait 0", "launch 1", "wait 1"]
    together = ["launch 2", "launch 0", "launch 1", "wait 2", "wait 0", "wait 1"]
    for told in run("fsdp_jobs.overlapping", 4):
        assert told == {
            "first": [*in_turn, "launch 3", "wait 3"],
            "usual": together,
            "raises": ["launch 2"],
            "after it": ["launch 3", "wait 2", "wait 3", "launch 2", "wait 2", *together[1:3], "wait 0", "wait 1"],
            "usual again": together,
            "divides": together,
            "after that": ["launch 2", "wait 2", "launch 0", "launch 1", "wait 0", "wait 1"],
            "usual once more": together,
            "accumulating": in_turn,
            "usual at last": together,
            "a hook looks": ["launch 2", "wait 2", "launch 0", "launch 1", "wait 0", "wait 1"],
        }


def test_replicas_begin_equal_and_are_made_equal_with_their_moments(run: Run) -> None:
    for rank, found in enumerate(run("fsdp_jobs.equal_replicas", 4)):
        assert found["apart, equal, equal, astray, equal"] == (True, True, True, True, True)
        assert found["synchronized"]
        assert found["moments"]
        assert found["taken"] == (rank >= 2)


def test_all_shards_leave_a_step_out_that_one_of_them_finds_void(run: Run) -> None:
    """Each of them decided for itself, so that a replica went on by a part of its update. Rule: clock-38."""
    assert run("fsdp_jobs.voided", 4) == [[True, False, True]] * 4


def test_what_cannot_be_is_refused(run: Run) -> None:
    run("fsdp_jobs.refusals", 4)


def test_one_host(run: Run) -> None:
    run("fsdp_jobs.alone", 2)

"""Replicas that came apart, ranks that were stopped, late gradients: real processes over udp on loopback."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.needs("torch")


@pytest.mark.parametrize(
    ("share", "losers"),
    [(50.0, {0}), pytest.param(50.0, {0, 1}, marks=pytest.mark.thorough), (50.0, {0, 1, 2}), (0.0, {0, 1, 2})],
    ids=["one_loser", "two_losers", "all_losers", "on_demand"],
)
def test_replicas_forced_apart_come_together(tmp_path: Path, share: float, losers: set[int]) -> None:
    """Parameters and the optimizer's state are equal bit by bit after a few steps, or after one call on all ranks.

    Rules: clock-21, codec-13.
    """
    import resync_jobs
    from processes import Job

    with Job(resync_jobs.drifting, 3, tmp_path, share, losers) as job:
        results = job.results()
    digests, sound = zip(*(result["apart"] for result in results), strict=True)
    assert len(set(digests)) > 1
    assert not all(sound)
    nobody = bool(share) and not any(sound)  # which rows get lost hangs on what leaves together: a rank may be spared
    assert all(result["synchronised"] for result in results)
    counts = [r["stats"]["replica"]["counters"] for r in results]
    took = [one.get("slices_taken", 0) + one.get("whole_taken", 0) for one in counts]
    assert any(took)
    assert not all(took) or len(losers) > 1  # who has missed nothing takes nothing
    led = [one.get("led", 0) for one in counts]
    assert bool(led[0]) or not nobody
    assert not any(led) or len(losers) == 3
    digests, sound = zip(*results[0]["together"], strict=True)
    assert len(set(digests)) == 1
    assert all(sound)
    digests, sound = zip(*(result["after"] for result in results), strict=True)
    equal = {digest for digest, well in zip(digests, sound, strict=True) if well}
    assert len(equal) <= 1  # what has got lost anew has made its rank unsound


def test_a_replica_that_is_changed_without_a_lost_result_is_found_and_made_equal(tmp_path: Path) -> None:
    """The one that differs from most takes what they hold (clock-33)."""
    import resync_jobs
    from processes import Job

    with Job(resync_jobs.altered, 3, tmp_path) as job:
        results = job.results()
    assert len({result["apart"] for result in results}) == 2
    assert len(set(results[0]["together"])) == 1
    assert results[1]["counters"]["digests_unlike"] >= 1
    assert results[1]["counters"].get("slices_taken", 0) + results[1]["counters"].get("whole_taken", 0) >= 1


def test_a_rank_that_ran_out_of_data_is_made_equal_when_all_go_on(tmp_path: Path) -> None:
    """DDP's ``join`` gives it the others' parameters; what the optimizer keeps has made fewer steps."""
    import resync_jobs
    from processes import Job

    with Job(resync_jobs.joined, 3, tmp_path) as job:
        results = job.results()
    assert [result["sound"] for result in results] == [False, True, True]
    assert len({result["apart"] for result in results}) == 2
    assert len({result["together"] for result in results}) == 1


@pytest.mark.parametrize(
    "losers", [{0}, pytest.param({1}, marks=pytest.mark.thorough), {0, 1, 2}], ids=["first", "second", "all"]
)
def test_ranks_that_synchronise_are_equal_and_may_go_on_or_leave_at_once(tmp_path: Path, losers: set[int]) -> None:
    """Without a barrier before or after: steps follow in which a rank may not give its state any more, then the end."""
    import resync_jobs
    from processes import Job

    with Job(resync_jobs.parting, 3, tmp_path, losers) as job:
        results = job.results()
    assert len({result["apart"] for result in results}) > 1
    for middle, end in zip(results[0]["digests"], zip(*(r["digests"] for r in results), strict=True), strict=True):
        assert set(end) == {middle}
    assert all(all(result["well"]) for result in results)


def test_lost_results_are_fetched_before_they_part_replicas(tmp_path: Path) -> None:
    """90 % of a rank's results are lost, repeated ones too: no replica comes apart. Rule: clock-35."""
    import resync_jobs
    from processes import Job

    with Job(resync_jobs.fetching, 3, tmp_path, 1) as job:
        results = job.results()
    for rank, result in enumerate(results):
        counters = result["stats"]["counters"]
        assert result["well"]
        assert result["stats"]["replica"]["sound"]
        assert result["together"] == results[0]["together"]
        assert counters.get("rows_fetched", 0) == counters.get("rows_fetch_asked", 0)
        assert (counters.get("rows_fetched", 0) > 0) == (rank != 1)
    assert results[1]["stats"]["counters"]["rows_given"] > 0


def test_a_rank_that_leaves_still_gives_the_results_that_others_miss(tmp_path: Path) -> None:
    """90 % of its results are lost, in its last step too, after which it closes at once. Rules: clock-15, clock-35."""
    import resync_jobs
    from processes import Job

    with Job(resync_jobs.leaving, 3, tmp_path, 1) as job:
        assert len(set(job.results())) == 1


def _stopped(folder: Path, ring_mib: float, missed: int, steps: int, *more: float) -> dict[str, Any]:
    """What the last of three ranks tells that was stopped while the others made ``missed`` of ``steps`` steps."""
    import resync_jobs
    from processes import Job

    context = multiprocessing.get_context("forkserver")
    ready, moved = context.Event(), context.Event()
    with Job(resync_jobs.stopped, 3, folder, 2, ring_mib, missed, steps, ready, moved, *more) as job:
        job.await_event(ready, "the last rank about to stop")
        job.await_event(moved, "the others some steps further")
        os.kill(job.processes[2].pid, signal.SIGCONT)
        back: dict[str, Any] = job.results()[2]
    return back


def _same_in_the_end(back: dict[str, Any]) -> None:
    assert len({digest for digest, sound, _ in back["digests"] if sound}) <= 1, back["digests"]
    assert len({digest for digest, _, synchronised in back["digests"] if synchronised}) == 1, back["digests"]


def test_a_stopped_rank_applies_what_the_others_have_finished(tmp_path: Path) -> None:
    """It computes none of the steps it was away for, and comes out with the same bits (clock-20)."""
    back = _stopped(tmp_path, ring_mib=8.0, missed=10, steps=60)
    applied = back["stats"]["counters"]["steps_applied"]
    assert applied >= 9
    assert len(back["computed"]) + applied == 60
    assert back["jumped"] == 0
    _same_in_the_end(back)


def test_a_lost_rank_jumps_and_takes_the_state_of_another(tmp_path: Path) -> None:
    """The ring holds a few steps only: what the rank missed is gone (clock-20, clock-21)."""
    back = _stopped(tmp_path, ring_mib=0.5, missed=30, steps=90)
    assert back["jumped"] >= 25
    assert back["stats"]["replica"]["counters"]["whole_taken"] >= 1
    applied = back["stats"]["counters"].get("steps_applied", 0)
    assert len(back["computed"]) + back["jumped"] + applied == 90  # at the same place in the data as the others
    _same_in_the_end(back)


def test_a_model_of_many_rings_goes_on_with_losses_and_a_lost_rank(tmp_path: Path) -> None:
    """A step goes through the ring twelve times; 1 % of all packets get lost, and one rank jumps meanwhile."""
    back = _stopped(tmp_path, 0.004, 6, 40, 156, 0.01)
    assert back["held"] < 0.1
    assert back["jumped"] >= 5
    assert back["stats"]["replica"]["counters"]["whole_taken"] >= 1
    assert len(back["computed"]) + back["jumped"] == 40
    assert back["stats"]["delivered"] > 0.5
    _same_in_the_end(back)


def test_a_lost_rank_without_batches_makes_void_iterations_until_it_is_where_the_others_are(tmp_path: Path) -> None:
    """It had as many iterations left over as it had skipped: it trained alone, and the others took its state then.

    Its learning rate was that of an earlier step for good. They waited for seconds in a collective of the program.
    """
    import resync_jobs
    from processes import Job

    context = multiprocessing.get_context("forkserver")
    ready, moved = context.Event(), context.Event()
    with Job(resync_jobs.stopped_plain, 3, tmp_path, 2, 30, 150, 100, ready, moved) as job:
        job.await_event(ready, "the last rank about to stop")
        job.await_event(moved, "the others some steps further")
        os.kill(job.processes[2].pid, signal.SIGCONT)
        results = job.results()
    back, others = results[2], results[:2]
    assert back["stats"]["counters"].get("jumps", 0) >= 1
    assert back["stats"]["replica"]["counters"]["whole_taken"] >= 1
    assert all(not one["stats"]["counters"].get("jumps", 0) for one in others)
    assert all(one["waited"] < 1.0 for one in others)
    assert [one["alone"] for one in results] == [0, 0, 0]
    assert [one["step"] for one in results] == [150] * 3
    expected = [0.05 * min(1.0, (step + 1) / 200) for step in range(150)]
    for one in results:
        assert all(rate == pytest.approx(expected[step]) for step, rate in one["rates"].items())
    assert all(one["synchronised"] for one in results)
    assert len({one["digest"] for one in results}) == 1


@pytest.mark.parametrize(("ring_mib", "away"), [(8.0, 7), (0.5, 30)], ids=["behind", "lost"])
def test_a_rank_with_two_passes_an_iteration_comes_back_in_step(tmp_path: Path, ring_mib: float, away: int) -> None:
    """Its first pass was averaged with the others' second one for ever, in about half of the cases (B1)."""
    import resync_jobs
    from processes import Job

    context = multiprocessing.get_context("forkserver")
    ready, moved = context.Event(), context.Event()
    steps = away + 50
    with Job(resync_jobs.stopped_between_passes, 3, tmp_path, 2, ring_mib, away, steps, ready, moved) as job:
        job.await_event(ready, "the last rank about to stop")
        job.await_event(moved, "the others some iterations further")
        os.kill(job.processes[2].pid, signal.SIGCONT)
        results = job.results()
    back = results[2]
    assert back["passes"] == [2 * steps] * 3
    assert back["applied" if away == 7 else "jumped"] >= away - 4
    assert len(back["computed"]) + back["jumped"] + back["applied"] == steps
    assert len(set(back["synchronised"])) == 1, back["synchronised"]
    assert back["synchronised"][0][0]


def test_a_forward_pass_before_the_optimizer_steps_is_no_boundary(tmp_path: Path) -> None:
    """Else the replica would be given to others as that after a step that it has not made yet."""
    import resync_jobs
    from processes import Job

    with Job(resync_jobs.between, 2, tmp_path) as job:
        for seen in job.results():
            assert seen == [(None, None, 0), (0, 0, 1), (1, 1, 1), (2, 2, 3), (3, 3, 4)]


def test_an_optimizer_that_makes_both_passes_is_read_in_the_forward_pass_only(tmp_path: Path) -> None:
    """Its update follows the backward pass: others took it half written for the state after the step before."""
    import resync_jobs
    from processes import Job

    with Job(resync_jobs.closures, 2, tmp_path) as job:
        for seen in job.results():
            in_forward, after_backward, after_step = seen[:-1:3], seen[1:-1:3], seen[2:-1:3]
            assert after_backward == after_step == [None] * 3
            assert (in_forward, seen[-1]) == ([None, 0, 1], 2)


@pytest.mark.thorough  # failed once of two runs, on a loaded machine: not understood yet
def test_the_others_wait_for_a_first_pass_that_compiles(tmp_path: Path) -> None:
    """Without an option: a rank holds until it has launched its first step (clock-16)."""
    import resync_jobs
    from processes import Job

    with Job(resync_jobs.compiling, 3, tmp_path) as job:
        assert max(job.results()) < 4e-3


@pytest.mark.parametrize("stuck", [False, True])
def test_the_others_wait_for_a_rank_that_holds(tmp_path: Path, stuck: bool) -> None:
    """Also for one whose Python cannot run meanwhile: the C library's ``usleep``, called with the GIL (clock-16)."""
    import resync_jobs
    from processes import Job

    with Job(resync_jobs.holding, 3, tmp_path, stuck) as job:
        assert job.results() == [[0, 0]] * 3


def test_a_model_larger_than_the_ring_trains_in_step(tmp_path: Path) -> None:
    """15 M parameters, a ring of 11 M, one rank 400 ms late in every step: who is in step neither jumps nor skips."""
    import resync_jobs
    from processes import Job

    steps = 6
    with Job(resync_jobs.large, 3, tmp_path, 2, steps) as job:
        results = job.results()
    for result in results:
        assert result["entries"] > 15e6
        assert all(behind > 0 for behind in result["asked"]), result["asked"]
        applied = result["counters"].get("steps_applied", 0)
        assert len(result["computed"]) + result["skipped"] + applied >= steps  # what is skipped last has no batch
        assert result["synchronised"]
    assert results[0]["weights"] == results[1]["weights"] == results[2]["weights"]

"""Whole jobs over udp: the books balance against what was lost on purpose, safeguards bind all ranks, rotation goes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import MS, Team, Trouble, exact_mean, gradients, nmse, patient, team
from tailbound.errors import TransportError
from tailbound.transport import rotation, status
from tailbound.transport.ledger import balanced
from tailbound.transport.safeguard import Limits
from tailbound.wire.schema import UNKNOWN_SENDER, PacketType, Verdict

NUMEL = 8 * 64 * 256
#: Nothing is repaired and rows stay where they are, so that every lost packet shows once, and where it was lost.
PLAIN: dict[str, Any] = {"repair": False, "share_rows": False, "quiet": 50 * MS}


def books(job: Team, stage: str) -> dict[tuple[int, int], dict[str, int]]:
    """Entries by (who counts, whose rows)."""
    return {
        (rank, int(peer)): entry
        for rank, member in enumerate(job.communicators)
        for peer, entry in member.stats()["ledger"][stage].items()
    }


def check(job: Team) -> None:
    """The books balance, and those of contributions agree with what the datapath has summed."""
    for member in job.communicators:
        stats = member.stats()
        for stage in stats["ledger"].values():
            assert all(balanced(entry) for entry in stage.values())
        assert stats["rows_summed"] == sum(e["taken"] for e in stats["ledger"]["contributions"].values())
        json.dumps(stats)


def test_without_trouble_everything_is_taken() -> None:
    with team(3, patient(**PLAIN | {"quiet": 2000 * MS})) as job:
        for op in range(5):
            job.allreduce(gradients("U", 3, NUMEL, seed=op))
        check(job)
        for stage in ("contributions", "results"):
            for entry in books(job, stage).values():
                assert entry["ops"] == 5
                assert entry["expected"] == entry["taken"] > 0
        assert job[0].stats()["event_counts"] == {"results_by": 1}  # how they leave is told once


@pytest.mark.parametrize(
    ("kind", "stage"), [(PacketType.CONTRIBUTION, "contributions"), (PacketType.RESULT, "results")]
)
def test_what_was_lost_on_purpose_is_booked_as_lost(kind: PacketType, stage: str) -> None:
    """Per sender and receiver, to the packet: two countings that know nothing of each other."""
    ranks = 3
    with team(ranks, patient(**PLAIN)) as job:
        job.allreduce(gradients("U", ranks, NUMEL, seed=99))
        troubles = [Trouble(7, loss=0.03, types=frozenset({kind})).attach(member) for member in job.communicators]
        for op in range(6):
            for out, outcome in job.allreduce(gradients("U", ranks, NUMEL, seed=op)):
                assert outcome.error is None
                assert np.isfinite(out).all()
        check(job)
        found = books(job, stage)
        for (rank, peer), entry in found.items():
            assert entry["lost"] == troubles[peer].dropped.get((rank, kind), 0), (rank, peer)
            assert entry["absent"] == entry["refused"] == 0
            assert entry["expected"] == entry["taken"] + entry["lost"] + entry["late"]
        assert sum(entry["lost"] for entry in found.values()) > 20


def test_frames_in_pieces_are_told_with_a_remedy(caplog: pytest.LogCaptureFixture) -> None:
    """What the kernel's program counts as NOT_LINEAR is never lost in silence; only a rising count is told again."""
    with team(2, patient(**PLAIN | {"quiet": 2000 * MS})) as job:
        job.allreduce(gradients("U", 2, NUMEL, seed=0))
        job[0].job.store.ledger["verdict"][UNKNOWN_SENDER, Verdict.NOT_LINEAR] += np.uint64(7)
        for op in range(3):
            for _, outcome in job.allreduce(gradients("U", 2, NUMEL, seed=op)):
                assert outcome.error is None  # other rows come
        assert job[0].stats()["event_counts"]["not_linear"] == 1
        assert "not_linear" not in job[1].stats()["event_counts"]
    (line,) = (r.getMessage() for r in caplog.records if "NOT_LINEAR" in r.getMessage())
    assert "7 frames" in line
    assert "TAILBOUND_MTU" in line


def test_an_op_fails_where_all_frames_come_in_pieces() -> None:
    deaf = frozenset({PacketType.CONTRIBUTION, PacketType.RESULT})
    with team(
        2, patient(**PLAIN | dict.fromkeys(("deadline_1", "deadline_2", "stage_max", "start_max"), 300 * MS))
    ) as job:
        Trouble(3, loss=1.0, types=deaf).attach(job[1])
        job[0].job.store.ledger["verdict"][UNKNOWN_SENDER, Verdict.NOT_LINEAR] += np.uint64(7)
        (_, outcome), _ = job.allreduce(gradients("U", 2, NUMEL, seed=0))
        assert isinstance(outcome.error, TransportError)
        assert "in pieces" in str(outcome.error)


def test_duplicates_are_booked_apart() -> None:
    with team(2, patient(**PLAIN | {"quiet": 2000 * MS})) as job:
        troubles = [Trouble(3, duplicate=0.05).attach(member) for member in job.communicators]
        for op in range(4):
            job.allreduce(gradients("U", 2, NUMEL, seed=op))
        check(job)
        entries = [*books(job, "contributions").values(), *books(job, "results").values()]
        assert all(entry["expected"] == entry["taken"] for entry in entries)
        assert 0 < sum(entry["duplicated"] for entry in entries) <= sum(t.doubled for t in troubles)


def test_repaired_rows_are_taken_and_counted() -> None:
    with team(3, patient(share_rows=False, quiet=20 * MS)) as job:
        for member in job.communicators:
            Trouble(5, loss=0.02, types=frozenset({PacketType.RESULT})).attach(member)
        for op in range(6):
            job.allreduce(gradients("U", 3, NUMEL, seed=op))
        check(job)
        assert sum(entry["repaired"] for entry in books(job, "results").values()) > 10


def test_an_owner_that_lost_too_much_makes_all_ranks_skip() -> None:
    """One rank hears nothing of the others' rows: all of them get zeros for this op, and go on with the next one."""
    ranks = 3
    with team(ranks, patient(**PLAIN, safeguard=Limits(skip_op=0.5, skip_smoothed=None))) as job:
        job.allreduce(gradients("U", ranks, NUMEL, seed=0))
        deaf = [
            Trouble(1, loss=0.9, types=frozenset({PacketType.CONTRIBUTION}), to=frozenset({1})).attach(job[rank])
            for rank in (0, 2)
        ]
        results = job.allreduce(gradients("U", ranks, NUMEL, seed=1))
        for out, outcome in results:
            assert outcome.skipped
            assert outcome.error is None
            assert not out.any()
        for trouble in deaf:
            trouble.loss = 0.0
        inputs = gradients("U", ranks, NUMEL, seed=2)
        for out, outcome in job.allreduce(inputs):
            assert not outcome.skipped
            assert nmse(out, exact_mean(inputs)) < 1.5e-3
        stats = [member.stats() for member in job.communicators]
        assert [s["counters"]["ops_skipped"] for s in stats] == [1, 1, 1]
        assert stats[1]["counters"]["safeguard_skip"] == 1
        assert {"loss", "skipped"} <= {e["event"] for e in stats[1]["events"]}


def test_beyond_the_last_limit_every_rank_stops() -> None:
    ranks = 2
    with team(ranks, patient(**PLAIN, safeguard=Limits(stop_op=0.5))) as job:
        job.allreduce(gradients("U", ranks, NUMEL, seed=0))
        Trouble(1, loss=0.95, types=frozenset({PacketType.CONTRIBUTION})).attach(job[0])
        for _, outcome in job.allreduce(gradients("U", ranks, NUMEL, seed=1)):
            assert isinstance(outcome.error, TransportError)
            assert "safeguard" in str(outcome.error)
        for member in job.communicators:
            with pytest.raises(TransportError, match="more contributions were lost"):
                member.allreduce(np.ones(NUMEL, np.float32))


def test_the_rotation_goes_when_it_is_calm_and_comes_with_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same op on all ranks: the bits stay equal across both switches."""
    monkeypatch.setattr(rotation, "CALM_OPS", 6)
    ranks, numel = 3, 2 * 64 * 256
    settings = patient(**PLAIN | {"quiet": 100 * MS}, rotate="auto")
    with team(ranks, settings) as job:

        def until(state: bool, most: int) -> None:
            for op in range(most):
                inputs = gradients("U", ranks, numel, seed=op)
                results = job.allreduce(inputs)
                if not any(o.delivered < o.expected for _, o in results):
                    assert nmse(results[0][0], exact_mean(inputs)) < 2e-3
                    for out, _ in results:
                        np.testing.assert_array_equal(out.view(np.uint32), results[0][0].view(np.uint32))
                if all(member.stats()["status"]["map"]["rotate"] is state for member in job.communicators):
                    return
            pytest.fail(f"the rotation did not become {state}")

        assert all(member.stats()["status"]["map"]["rotate"] for member in job.communicators)
        until(False, 60)
        trouble = Trouble(2, loss=0.2, types=frozenset({PacketType.CONTRIBUTION})).attach(job[2])
        until(True, 60)
        trouble.loss = 0.0


def test_a_trace_is_left_at_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAILBOUND_TRACE", str(tmp_path / "traces"))
    with team(2, patient(**PLAIN | {"quiet": 2000 * MS})) as job:
        for op in range(4):
            job.allreduce(gradients("U", 2, NUMEL, seed=op))
        assert job[0].trace(tmp_path / "now.json").exists()
    files = sorted((tmp_path / "traces").iterdir())
    assert [f.name.rpartition("-")[2] for f in files] == ["rank0.json", "rank1.json"]
    for rank, file in enumerate(files):
        events = json.loads(file.read_text())["traceEvents"]
        spans = [e for e in events if e["ph"] == "X"]
        assert {e["pid"] for e in spans} == {rank}
        by_stage = {name: [e for e in spans if e["cat"] == name] for name in {e["cat"] for e in spans}}
        assert {name: len(found) for name, found in by_stage.items()} == dict.fromkeys(
            ("op", "queue", "agree", "encode and send", "wait for contributions", "average and publish",
             "wait for results", "decode"), 4,
        )  # fmt: skip
        for whole in by_stage["op"]:
            inside = [e for e in spans if e["name"].split()[-1] == whole["name"].split()[-1]]
            assert all(e["dur"] >= 0 for e in inside)
            assert max(e["ts"] + e["dur"] for e in inside) <= whole["ts"] + whole["dur"] + 0.001


def test_a_status_is_there_while_the_job_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAILBOUND_STATUS", str(tmp_path))
    monkeypatch.setattr(status, "PERIOD", 0.05)
    with team(2, patient(**PLAIN)) as job:
        for op in range(3):
            job.allreduce(gradients("U", 2, NUMEL, seed=op))
        until = time.monotonic() + 30
        found: list[dict[str, Any]] = []
        while [s["ops"] for s in found] != [3, 3]:
            assert time.monotonic() < until
            found = status.read([tmp_path])
        assert [(s["rank"], s["pid"], s["delivered"]) for s in found] == [(0, os.getpid(), 1.0), (1, os.getpid(), 1.0)]
    assert list(tmp_path.iterdir()) == []

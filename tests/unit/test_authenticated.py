"""Whole jobs with a key, over udp in one process. Rules: auth-1, auth-3 to auth-6."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from support import Team, await_that, gradients, patient, team
from tailbound.collective.alerts import Alerts
from tailbound.collective.announce import hold
from tailbound.transport import forgeries, keys
from tailbound.wire import packets
from tailbound.wire.schema import UNKNOWN_SENDER, Verdict

NUMEL = 8 * 64 * 256


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_bytes(bytes(range(7, 39)))
    path.chmod(0o600)
    return str(path)


def averages(job: Team, ops: int = 4) -> list[bytes]:
    found = []
    for op in range(ops):
        results = job.allreduce(gradients("U", len(job), NUMEL, seed=op))
        assert all(o.delivered == o.expected and o.error is None and not o.missing for _, o in results)
        assert len({out.tobytes() for out, _ in results}) == 1
        found.append(results[0][0].tobytes())
    return found


def test_a_key_that_rank_0_draws_and_results_over_tcp() -> None:
    with team(2, patient(authenticate="on", fetch=10**9)) as job:
        averages(job)
        one, other = job.communicators
        one.reliable.serve("asked", lambda request: [request])
        assert other.reliable.pull(0, "asked", b"well", 5) == b"well"
        assert other.reliable._key == one.reliable._key
        assert len(one.reliable._key) == 32


def test_forged_packets_are_said_and_counted(key_file: str, caplog: pytest.LogCaptureFixture) -> None:
    """Rule: auth-1."""
    with team(2, patient(key_file=key_file)) as job:
        one = job.communicators[0]
        assert one.stats()["counters"]["requests_forged"] == 0
        alerts = Alerts(one.job, None, one.job.events)  # type: ignore[arg-type]
        one.job.store.ledger["verdict"][UNKNOWN_SENDER, Verdict.FORGED] += 3
        for now in (1, 2):
            alerts.look_for_forged(7, 0, now)
        assert [r.getMessage() for r in caplog.records if "3 packets came without a right tag" in r.getMessage()]
        assert one.job.events.counts["forged"] == 1
        one.job.store.ledger["verdict"][UNKNOWN_SENDER, Verdict.FORGED] += forgeries.MOST
        for now in (3, 4):
            alerts.look_for_forged(7, 0, now)
        assert one.job.events.counts["keys_tried"] == 1
        assert "somebody may be trying keys" in caplog.text
        one.job.store.ledger["verdict"][UNKNOWN_SENDER, Verdict.FORGED] -= forgeries.MOST + 3


def test_no_secret_is_in_logs_status_files_and_traces(
    key_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns of keys, forged rows. Rule: auth-3."""
    monkeypatch.setattr(keys.KeyRing.__init__, "__defaults__", (0, 4, 0))
    caplog.set_level(logging.DEBUG, "tailbound")
    status, traces = tmp_path / "status", tmp_path / "traces"
    traces.mkdir()
    monkeypatch.setenv("TAILBOUND_STATUS", str(status))
    monkeypatch.setenv("TAILBOUND_TRACE", str(traces))
    secrets = [bytes(range(7, 39))]
    with team(2, patient(key_file=key_file)) as job:
        for ops in range(3):
            averages(job, 4)
            for member in job.communicators:
                ring = member.job.keys
                assert ring is not None
                assert ring.at >= 4 * ops
                secrets += [ring._secret, member.reliable._key, *(key.tobytes()[:32] for key in ring.both)]
        job[0].job.store.ledger["verdict"][UNKNOWN_SENDER, Verdict.FORGED] += forgeries.MOST + 1
        Alerts(job[0].job, None, job[0].job.events).look_for_forged(13, 0, 1)  # type: ignore[arg-type]
        await_that(lambda: len(list(status.glob("*.json"))) == 2, "both have written")
        shown = [file.read_bytes() for file in status.glob("*.json")]
    shown += [file.read_bytes() for file in traces.iterdir()]
    shown += ["\n".join(f"{r.getMessage()} {vars(r)}" for r in caplog.records).encode()]
    assert len(shown) == 2 + 2 + 1
    assert all(len(text) > 100 for text in shown)
    for secret in set(secrets):
        assert len(secret) == 32
        words = [word for word in np.frombuffer(secret, np.uint64) if word >> 40]  # one of a key is a flag
        for form in (secret, secret.hex().encode(), repr(secret).encode(), *(str(word).encode() for word in words)):
            assert not any(form in text for text in shown)


def test_control_packets_of_others_and_of_yesterday_are_refused(key_file: str) -> None:
    with team(2, patient(key_file=key_file)) as job:
        averages(job, 2)
        one, other = job.communicators
        taken = other.job.counters["control_taken"]
        sent = one._engine.ask(lambda: hold(one.job, over=True))[0]
        await_that(lambda: other.job.counters["control_taken"] > taken, "the word is heard")
        before, replayed = other.job.counters["control_taken"], other.job.counters["control_replayed"]

        def take(data: bytes) -> None:
            other._engine.ask(lambda: other._engine._inbox.take(data, {}))

        for data in (sent, sent):
            take(data)
        assert other.job.counters["control_replayed"] == replayed + 2
        bare = packets.packet(packets.header(type=8, cookie=other.job.cookie, sender=0, owner=1), b"")
        take(bare)
        assert other.job.counters["control_refused"] == 1
        assert other.job.counters["control_taken"] == before

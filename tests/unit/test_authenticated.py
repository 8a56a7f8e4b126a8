"""Jobs with a key: forged and repeated packets in virtual time, secrets over udp. Rules: auth-1, auth-3 to auth-6."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import packed
from sim.team import SimTeam, sim_team
from support import await_that, gradients, patient, team
from tailbound.collective.alerts import Alerts
from tailbound.collective.holding import hold
from tailbound.collective.inbox import Inbox
from tailbound.transport import keys
from tailbound.wire.schema import UNKNOWN_SENDER, PacketType, Verdict
from tailbound_lab.simulate.fabric import MS

NUMEL = 8 * 64 * 64


@pytest.fixture
def job() -> Iterator[SimTeam]:
    with sim_team(2, patient(width=64, key_file="drawn")) as made:
        for op in range(2):
            made.allreduce(gradients("U", 2, NUMEL, seed=op))
        yield made


def test_forged_packets_are_said_and_counted(job: SimTeam, caplog: pytest.LogCaptureFixture) -> None:
    """Rule: auth-1."""
    one = job[0].job
    alerts = Alerts(one, None, one.events)
    for now, forged, event, words in (
        (1, 3, "forged", "3 packets came without a right tag"),
        (3, keys.MOST, "keys_tried", "somebody may be trying keys"),
    ):
        one.store.ledger["verdict"][UNKNOWN_SENDER, Verdict.FORGED] += forged
        job[0].node.datapath.taken += forged
        for again in (now, now + 1):
            alerts.look_for_forged(7, 0, again)
        assert one.events.counts[event] == 1
        assert words in caplog.text


def test_control_packets_of_others_and_of_yesterday_are_refused(job: SimTeam) -> None:
    def counts() -> list[int]:
        return [getattr(job[1].job.voice, f"control_{what}") for what in ("replayed", "refused")]

    word = hold(job[0].job, over=True)[0]
    job.go(1 * MS)
    replayed, refused = counts()
    bare = packed.packet(packed.header(type=PacketType.HOLD, cookie=job[1].job.cookie, sender=0, owner=1), b"")
    hello = job[0].job.word(1, job[0].job.header(PacketType.HELLO, 0, 0))  # may be repeated, so it does not count
    inbox, heard = Inbox(job[1].job, None, None, Mock()), job[1].job.spoke(0)
    job.go(1 * MS)
    for data in (word, word, bare, hello):  # as a datapath does that does not look at tags of control packets
        inbox.receive(data, {})
    assert counts() == [replayed + 2, refused + 1]
    assert job[1].job.spoke(0) == heard


def test_no_secret_is_in_logs_status_files_and_traces(
    tmp_path: Path, key_file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns of keys, forged rows. Rule: auth-3."""
    monkeypatch.setattr(keys.KeyRing.__init__, "__defaults__", (0, 4, lambda epoch, key: None))
    monkeypatch.setattr(keys.Forgeries.ask, "__defaults__", (0,))
    monkeypatch.setattr(keys, "NEAR", 2)
    caplog.set_level(logging.DEBUG, "tailbound")
    status, traces, secrets = tmp_path / "status", tmp_path / "traces", [key_file.read_bytes()]
    traces.mkdir()
    monkeypatch.setenv("TAILBOUND_STATUS", str(status))
    monkeypatch.setenv("TAILBOUND_TRACE", str(traces))
    with team(2, patient(key_file=str(key_file))) as job:
        for turns in range(3):
            while any(member.job.keys.turns < turns for member in job.communicators):
                job.allreduce(gradients("U", 2, NUMEL, seed=turns))
            for member in job.communicators:
                ring = member.job.keys
                secrets += [ring._secret, member.reliable._key, *(key.tobytes()[:32] for key in ring.both)]
        job[0].job.store.ledger["verdict"][UNKNOWN_SENDER, Verdict.FORGED] += keys.MOST + 1
        Alerts(job[0].job, None, job[0].job.events).look_for_forged(13, 0, 1)
        assert job[0].stats()["counters"]["requests_forged"] == 0
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

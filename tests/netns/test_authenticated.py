"""Jobs with a key over XDP between namespaces: bits of a job without one, and what a cable damages (auth-1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab_team import lab_team
from support import MS, exact_mean, gradients, nmse, patient
from tailbound.settings.table import switch_of
from tailbound.transport import keys
from tailbound.wire.schema import Tagging
from tailbound_lab.lab.cluster import Cluster

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

Make = Callable[..., Cluster]
STRAY = {"STALE_RESULT"}
RANKS, OPS = 3, 6


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return str(path)


def test_a_switch_that_has_no_key(tailbound_lab: Make, key_file: str, caplog: pytest.LogCaptureFixture) -> None:
    """Rule: auth-7."""
    lab = tailbound_lab(workers=RANKS, switch=True)
    where = switch_of(None, lab.switch.environment)
    settings = patient(width=1408, ring_mib=8.0, switch=where, key_file=key_file, authenticate="workers")
    with lab_team(lab, settings, cookie=lab.switch.entry.cookie) as job:
        for op in range(3):
            inputs = gradients("U", RANKS, 64 * 1408, seed=op)
            results = job.allreduce(inputs)
            assert all(outcome.delivered == outcome.expected for _, outcome in results)
            assert len({out.tobytes() for out, _ in results}) == 1
            assert nmse(results[0][0], exact_mean(inputs)) <= 5e-3
        for member in job.communicators:
            stats = member.stats()
            assert stats["authenticated"] == "workers"
            assert set(stats["drops"]) <= STRAY
            assert stats["event_counts"]["switch_unchecked"] == 1
            assert member.job.store.control["tagged"][0] & Tagging.ON
    assert f"{where.address} carry no tag" in caplog.text


def test_what_a_cable_damages_is_forged_and_too_much_of_it_turns_keys(
    tailbound_lab: Make, key_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules: auth-1, auth-8."""
    monkeypatch.setattr("tailbound.transport.forgeries.MOST", 10)
    monkeypatch.setattr(keys.KeyRing.__init__, "__defaults__", (0, 4096, 0))
    lab = tailbound_lab(workers=RANKS, seed=3, corrupt=0.01)
    with lab_team(lab, patient(width=1408, ring_mib=8.0, quiet=50 * MS, key_file=key_file, first_step=1000)) as job:
        for op in range(OPS):
            for _, outcome in job.allreduce(gradients("U", RANKS, 8 * 64 * 1408, seed=op)):
                assert outcome.error is None
        for _ in range(100):
            if all(member.job.keys and member.job.keys.turns for member in job.communicators):
                break
            job.allreduce(gradients("U", RANKS, 64 * 1408, seed=1))
        else:
            pytest.fail("no key gave way")
        drops = [member.stats()["drops"] for member in job.communicators]
        assert any(member.stats()["event_counts"].get("keys_tried") for member in job.communicators)
    assert sum(drop.get("FORGED", 0) for drop in drops) > 20
    assert not any("CORRUPT" in drop for drop in drops)

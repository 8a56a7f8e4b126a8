"""Jobs with a key through a switch that has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab_team import lab_team
from support import exact_mean, gradients, nmse, patient
from tailbound.settings.table import switch_of
from tailbound.wire.schema import Tagging
from tailbound_lab.lab.cluster import Cluster

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

Make = Callable[..., Cluster]
STRAY = {"STALE_RESULT"}
RANKS = 3


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

"""The algorithm's options in real processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.needs("torch")


def test_averages_at_every_number_of_bits(tmp_path: Path) -> None:
    import options_jobs
    from processes import Job

    with Job(options_jobs.any_bits, 2, tmp_path) as job:
        for errors in job.results():
            assert np.mean(errors["16"]) < 1e-6
            assert max(errors["fine"][:2]) < 1e-6 < min(errors["fine"][2:])
            assert 1e-5 < np.mean(errors["8"]) < 4e-3
            assert 1e-2 < np.mean(errors["4"]) < 0.3
            assert np.mean(errors["4,8"]) < 0.7 * np.mean(errors["4"])


def test_bits_change_between_steps(tmp_path: Path) -> None:
    """Each number of bits begins with scales of its own; ranks that do not change together are told so (codec-12)."""
    import options_jobs
    from processes import Job

    with Job(options_jobs.switching, 2, tmp_path) as job:
        for errors in job.results():
            bounds = [1.5e-3, 0.02, 1e-6, 1e-6, 0.3, 1.5e-3]
            assert all(error < bound for error, bound in zip(errors, bounds, strict=True)), errors


def test_error_feedback_says_in_the_end_what_codes_clip(tmp_path: Path) -> None:
    import options_jobs
    from processes import Job

    with Job(options_jobs.feedback, 2, tmp_path) as job:
        for found in job.results():
            assert found["without"] > 0.1
            assert found["with"] < found["without"] / 4


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64"])
def test_averages_take_the_place_of_gradients(tmp_path: Path, kind: str) -> None:
    import options_jobs
    from processes import Job

    with Job(options_jobs.in_place, 2, tmp_path, kind) as job:
        job.results()

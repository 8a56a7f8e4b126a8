"""The algorithm's options in real processes."""

from __future__ import annotations

import numpy as np
import pytest

from processes import Run

pytestmark = pytest.mark.needs("torch")


def test_averages_at_every_number_of_bits(run: Run) -> None:
    for errors in run("options_jobs.any_bits", 2):
        assert np.mean(errors["16"]) < 1e-6
        assert 1e-5 < np.mean(errors["8"]) < 4e-3
        assert 5e-3 < np.mean(errors["4,8"]) < 0.1


def test_bits_change_between_steps(run: Run) -> None:
    """Each number of bits begins with scales of its own; ranks that do not change together are told so (codec-12)."""
    for errors in run("options_jobs.switching", 2):
        bounds = [1.5e-3, 0.02, 1e-6, 1e-6, 0.02, 1.5e-3]
        assert all(error < bound for error, bound in zip(errors, bounds, strict=True)), errors


def test_error_feedback_says_in_the_end_what_codes_clip(run: Run) -> None:
    for found in run("options_jobs.feedback", 2):
        assert found["without"] > 0.1
        assert found["with"] < found["without"] / 4

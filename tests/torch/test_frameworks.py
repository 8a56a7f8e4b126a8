"""fp16 in Lightning and Accelerate: the scaler that a framework makes sees its rank's overflows, in real processes."""

from __future__ import annotations

import pytest

from processes import Run

pytestmark = [pytest.mark.needs("torch"), pytest.mark.thorough]


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param("lightning", marks=pytest.mark.needs("lightning")),
        pytest.param("accelerate", marks=pytest.mark.needs("accelerate")),
    ],
)
def test_overflows_lower_the_scale(run: Run, framework: str) -> None:
    """Of all ranks, which skip the step in which all overflow. Both frameworks clip: they unscale before they step."""
    import framework_jobs

    for found in run(f"framework_jobs.{framework}", 2):
        scale = framework_jobs.SCALE
        assert found["scales"] == [scale, scale / 2, scale / 2, *[scale / 4] * 3]
        assert found["moved"] == [len(ranks) < 2 for ranks in framework_jobs.ILL]
        assert found["alike"]

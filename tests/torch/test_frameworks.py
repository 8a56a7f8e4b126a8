"""fp16 in Lightning and Accelerate: the scaler that a framework makes sees its rank's overflows, in real processes."""

from __future__ import annotations

import pytest

from processes import Run

pytestmark = [pytest.mark.needs("torch"), pytest.mark.thorough]


@pytest.mark.parametrize("say", [True, False])
@pytest.mark.parametrize(
    "framework",
    [
        pytest.param("lightning", marks=pytest.mark.needs("lightning")),
        pytest.param("accelerate", marks=pytest.mark.needs("accelerate")),
    ],
)
def test_overflows_lower_the_scale(run: Run, framework: str, say: bool) -> None:
    """All ranks skip the step in which all overflow; both frameworks clip, and so unscale before they step."""
    import framework_jobs

    for rank, found in enumerate(run(f"framework_jobs.{framework}", 2, say)):
        scale = framework_jobs.SCALE
        lowered = [scale / 4 if rank == 1 else scale / 2] * 3
        assert found["scales"] == [scale, scale / 2, scale / 2, *lowered]
        assert found["moved"] == [len(ranks) < 2 for ranks in framework_jobs.ILL]
        assert found["alike"]

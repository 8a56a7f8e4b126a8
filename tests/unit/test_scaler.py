"""A gradient scaler that is taken into a job, and given to another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailbound.errors import ConfigError

pytestmark = pytest.mark.needs("torch")


def state(*, job: bool) -> Any:
    communicator = SimpleNamespace() if job else None
    return SimpleNamespace(scaler=None, shards=1, shares_scale=False, loss_scale=1.0, communicator=communicator)


def test_a_scaler_whose_job_is_over_scales_as_torchs_and_may_be_given_to_another() -> None:
    """Lightning fits twice with one scaler; or ``register`` has failed after it took the scaler in."""
    import torch

    from tailbound.torch.scaler import adopt

    first, second, one_rank = state(job=True), state(job=True), state(job=False)
    given: Any = torch.amp.GradScaler("cpu", 8.0, growth_interval=2)
    adopt(first, given)
    with pytest.raises(ConfigError, match="one for each registered model"):
        adopt(second, given)
    given.close()  # as the state does
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 1.0)
    for gradient in (8.0, float("inf")):  # nobody is told of the overflow
        weight.grad = torch.full((1,), gradient)
        given.step(optimizer)
        given.update()
    assert (weight.tolist(), given.get_scale(), first.loss_scale) == ([-1.0], 4.0, 8.0)
    adopt(one_rank, given)
    adopt(second, given)
    assert (second.scaler, second.loss_scale, given.get_scale()) == (given, 4.0, 4.0)


@pytest.mark.parametrize("factors", [{"growth_factor": 1.5}, {"backoff_factor": 0.7}])
def test_a_scale_whose_mantissa_would_part_ranks_is_refused(factors: dict[str, float]) -> None:
    """Averages times the scale, and divided by it again, would be rounded otherwise on each rank."""
    import torch

    from tailbound.torch.scaler import adopt

    given = torch.amp.GradScaler("cpu", 1000.0, **factors)
    with pytest.raises(ConfigError, match="give powers of two"):
        adopt(state(job=True), given)
    assert type(given) is torch.amp.GradScaler
    adopt(state(job=False), given)


def test_factors_of_a_checkpoint_are_looked_at_as_well() -> None:
    import torch

    from tailbound.torch.scaler import GradScaler

    ours = GradScaler(state(job=True))
    with pytest.raises(ConfigError, match="grows by"):
        ours.load_state_dict(torch.amp.GradScaler("cpu", growth_factor=1.5).state_dict())
    assert ours.get_growth_factor() == 2.0

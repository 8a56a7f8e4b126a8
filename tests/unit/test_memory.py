"""What a rank keeps from step to step, without a transport: residuals of gradients, and the scale of a loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from solo import without_job
from tailbound.errors import ConfigError

pytest.importorskip("torch", reason="missing capability 'torch'")

import torch

from tailbound.torch.memory import Memory
from tailbound.torch.paths import Paths
from tailbound.torch.scaler import GradScaler, adopt


def _value(x: float) -> torch.Tensor:
    return torch.full((4,), x)


def _step(kept: Any, x: torch.Tensor, *, feedback: bool, residual: float = 0.0, factor: float = 1.0) -> torch.Tensor:
    """One step of one bucket; what was contributed. ``residual``: what the engine would have left."""
    direct = x.dtype == torch.float32
    source, prepare, kept_back = kept.contribution(0, x, factor, direct=direct, feedback=feedback)
    if prepare is not None:
        prepare()
    contributed: torch.Tensor = source.clone()
    if kept_back is not None:
        kept_back[:] = residual
    return contributed


def test_a_residual_is_added_to_the_next_gradient() -> None:
    kept = Memory()
    assert _step(kept, _value(1), feedback=False, residual=100).tolist() == [1] * 4
    assert _step(kept, _value(1), feedback=True, residual=0.25).tolist() == [1] * 4
    assert _step(kept, _value(2), feedback=True, residual=0.5).tolist() == [2.25] * 4
    assert _step(kept, _value(1)[:3], feedback=True).tolist() == [1] * 3  # another bucket
    assert _step(kept, _value(1), feedback=True, residual=0.5).tolist() == [1] * 4
    kept.forget()
    assert _step(kept, _value(1), feedback=True).tolist() == [1] * 4


def test_nothing_is_kept_before_ddp_has_built_its_buckets() -> None:
    """As many entries may mean other parameters in the first two steps."""
    kept: list[bool] = []
    launch = lambda *_, handling, **__: kept.append(handling.residual is not None)  # noqa: E731
    state = without_job(communicator=SimpleNamespace(launch=launch, lost=False, behind=0), _feedback=True)
    for _ in range(4):
        state.average(0, _value(1.0), True)
    assert kept == [False, False, True, True]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_a_gradient_on_the_host_is_coded_where_it_lies(kind: str) -> None:
    """And its average is decoded over it, in its own type: nothing is allocated."""
    dtype = getattr(torch, kind)
    gradient, path = _value(1.5).to(dtype), Paths().of(torch.device("cpu"))
    memory = Memory()
    decoded = without_job().decoded(0, gradient, memory)
    source, prepare, _ = memory.contribution(0, gradient, direct=True)
    assert prepare is None
    assert {path.values(each).ctypes.data for each in (source, decoded)} == {gradient.data_ptr()}
    assert not memory._parts


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_what_is_kept_has_no_loss_scale_and_is_contributed_in_float32(kind: str) -> None:
    kept = Memory()
    scaled = {scale: _value(scale).to(getattr(torch, kind)) for scale in (4, 8)}
    for _ in range(2):
        assert _step(kept, scaled[4], feedback=True, factor=1 / 4).tolist() == [1] * 4
    assert _step(kept, scaled[8], feedback=True, residual=0.25, factor=1 / 8).tolist() == [1] * 4
    last = _step(kept, scaled[4], feedback=True, factor=1 / 4)
    assert (last.tolist(), last.dtype) == ([1.25] * 4, torch.float32)


def state(*, job: bool) -> Any:
    communicator = SimpleNamespace() if job else None
    return SimpleNamespace(scaler=None, shards=1, shares_scale=False, loss_scale=1.0, communicator=communicator)


def test_a_scaler_whose_job_is_over_scales_as_torchs_and_may_be_given_to_another() -> None:
    """Lightning fits twice with one scaler; or ``register`` has failed after it took the scaler in."""
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
    given, ours = torch.amp.GradScaler("cpu", 1000.0, **factors), GradScaler(state(job=True))
    with pytest.raises(ConfigError, match="give powers of two"):
        adopt(state(job=True), given)
    assert type(given) is torch.amp.GradScaler
    with pytest.raises(ConfigError, match="grows by"):
        ours.load_state_dict(given.state_dict())  # of a checkpoint
    assert (ours.get_growth_factor(), ours.get_backoff_factor()) == (2.0, 0.5)
    adopt(state(job=False), given)

"""What is kept from step to step: no transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.needs("torch")


def _value(x: float) -> torch.Tensor:
    import torch

    return torch.full((4,), x)


def _step(kept: Any, x: torch.Tensor, *, residual: float | None = None, factor: float = 1.0) -> torch.Tensor:
    """One step of one bucket; what was contributed. ``residual``: what the engine would have left."""
    from tailbound.torch.memory import Memory

    contribution = kept.begin(0, x, True, Memory().of(0, x.numel(), x.dtype), factor)
    if contribution.prepare is not None:
        contribution.prepare()
    source: torch.Tensor = contribution.source.clone()
    if residual is not None and contribution.residual is not None:
        contribution.residual[:] = residual
    return source


def test_a_residual_is_added_to_the_next_gradient() -> None:
    """From the third step on: before, the same number of entries may mean other parameters."""
    from tailbound.torch.contribution import Contributions

    kept = Contributions(True)
    assert _step(kept, _value(1), residual=100).tolist() == [1] * 4
    assert _step(kept, _value(1), residual=100).tolist() == [1] * 4
    assert _step(kept, _value(1), residual=0.25).tolist() == [1] * 4
    assert _step(kept, _value(2), residual=0.5).tolist() == [2.25] * 4
    assert _step(kept, _value(1)[:3]).tolist() == [1] * 3  # another bucket
    assert _step(kept, _value(1), residual=0.5).tolist() == [1] * 4
    kept.forget()
    assert _step(kept, _value(1)).tolist() == [1] * 4


def test_a_gradient_of_another_type_is_contributed_in_float32() -> None:
    import torch

    from tailbound.torch.contribution import Contributions

    for feedback in (False, True):
        kept = Contributions(feedback)
        for _ in range(4):
            source = _step(kept, _value(1.5).to(torch.bfloat16), residual=0.0)
            assert (source.dtype, source.tolist()) == (torch.float32, [1.5] * 4)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_a_gradient_on_the_host_is_coded_where_it_lies(kind: str) -> None:
    """And its average is decoded over it, in its own type: nothing is allocated."""
    import torch

    from tailbound.torch.contribution import Contributions
    from tailbound.torch.memory import Memory
    from tailbound.torch.paths import Paths

    dtype = getattr(torch, kind)
    gradient, path = _value(1.5).to(dtype), Paths().of(torch.device("cpu"))
    bucket = Memory().of(0, 4, dtype, native=dtype in path.native)
    contribution = Contributions(False).begin(0, gradient, True, bucket)
    assert contribution.prepare is None
    assert path.values(contribution.source).ctypes.data == gradient.data_ptr()
    decoded, result = bucket.targets(gradient)
    assert decoded is result is gradient
    assert path.values(decoded).ctypes.data == gradient.data_ptr()
    apart, result = bucket.targets()
    assert apart is result
    assert apart.data_ptr() != gradient.data_ptr()


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_what_is_kept_has_no_loss_scale(kind: str) -> None:
    """Gradients of 1 under scales of 4 and 8."""
    import torch

    from tailbound.torch.contribution import Contributions

    kept = Contributions(True)
    scaled = {scale: _value(scale).to(getattr(torch, kind)) for scale in (4, 8)}
    for _ in range(2):
        assert _step(kept, scaled[4], factor=1 / 4).tolist() == [1] * 4
    assert _step(kept, scaled[8], residual=0.25, factor=1 / 8).tolist() == [1] * 4
    assert _step(kept, scaled[4], factor=1 / 4).tolist() == [1.25] * 4

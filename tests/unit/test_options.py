"""What is kept from step to step, and when averages are applied: no transport, futures that the test completes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tailbound.collective.op import Outcome

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


@pytest.mark.parametrize("copies", [False, True])
def test_a_residual_is_added_to_the_next_gradient(copies: bool) -> None:
    """From the third step on: before, the same number of entries may mean other parameters."""
    from tailbound.torch.options.contribution import Contributions

    kept = Contributions(True, copies)
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

    from tailbound.torch.options.contribution import Contributions

    for feedback in (False, True):
        kept = Contributions(feedback, copies=False)
        for _ in range(4):
            source = _step(kept, _value(1.5).to(torch.bfloat16), residual=0.0)
            assert (source.dtype, source.tolist()) == (torch.float32, [1.5] * 4)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_a_gradient_on_the_host_is_coded_where_it_lies(kind: str) -> None:
    """And its average is decoded over it, in its own type: nothing is allocated."""
    import torch

    from tailbound.torch.memory import Memory
    from tailbound.torch.options.contribution import Contributions
    from tailbound.torch.paths import Paths

    dtype = getattr(torch, kind)
    gradient, path = _value(1.5).to(dtype), Paths().of(torch.device("cpu"))
    bucket = Memory().of(0, 4, dtype, native=dtype in path.native)
    contribution = Contributions(False, copies=False).begin(0, gradient, True, bucket)
    assert contribution.prepare is None
    assert path.values(contribution.source).ctypes.data == gradient.data_ptr()
    decoded, result = bucket.targets(gradient)
    assert decoded is result is gradient
    assert path.values(decoded).ctypes.data == gradient.data_ptr()
    apart, result = bucket.targets()
    assert apart is result
    assert apart.data_ptr() != gradient.data_ptr()


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_what_is_kept_has_no_loss_scale(kind: str, copies: bool) -> None:
    """Gradients of 1 under scales of 4 and 8."""
    import torch

    from tailbound.torch.options.contribution import Contributions

    kept = Contributions(True, copies)
    scaled = {scale: _value(scale).to(getattr(torch, kind)) for scale in (4, 8)}
    for _ in range(2):
        assert _step(kept, scaled[4], factor=1 / 4).tolist() == [1] * 4
    assert _step(kept, scaled[8], residual=0.25, factor=1 / 8).tolist() == [1] * 4
    assert _step(kept, scaled[4], factor=1 / 4).tolist() == [1.25] * 4


class _Steps:
    """Averages of numbered steps, applied through ``Schedule``; bucket b of step s has the value 10 s + b."""

    def __init__(self) -> None:
        from tailbound.torch.options.schedule import Schedule

        self.applied: list[tuple[int, bool]] = []
        self.delay = Schedule("delayed", lambda outcome, last: self.applied.append((outcome.label, last)))
        self.step = 0

    def run(self, sizes: tuple[int, ...] = (4, 4)) -> list[float]:
        import torch

        from tailbound.torch.options.schedule import Pending

        out = []
        for index, size in enumerate(sizes):
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            label = 10 * self.step + index
            value = torch.full((size,), float(label))
            pending = Pending(index, value, index == len(sizes) - 1, future, Outcome(label=label))
            got = self.delay.put_off(pending)
            future.set_result(value)
            assert got.wait().shape == (size,)
            out.append(float(got.wait()[0]))
        self.step += 1
        return out


def test_an_average_is_applied_one_step_later() -> None:
    steps = _Steps()
    assert [steps.run() for _ in range(7)] == [[0, 1], [10, 11], [20, 21], [0, 0], [30, 31], [40, 41], [50, 51]]
    assert steps.applied == [(10 * s + b, b == 1) for s in (0, 1, 2, 3, 4, 5) for b in (0, 1)]
    assert steps.delay.stats() == {"bubbles": 2}
    assert [float(average[0]) for average in steps.delay.take()] == [60, 61]
    assert steps.applied[-1] == (61, True)
    assert steps.run() == [0, 0]


def test_a_delayed_average_has_the_loss_scale_of_the_step_that_applies_it() -> None:
    import torch

    from tailbound.torch.options.schedule import SETTLING, Pending, Schedule, ready

    scale = [8.0]
    delay = Schedule("delayed", lambda outcome, last: None, lambda: scale[0])
    for now, applied in [(8.0, 8.0)] * SETTLING + [(8.0, 0.0), (4.0, 4.0), (4.0, 4.0), (8.0, 8.0)]:
        scale[0] = now
        value = torch.full((4,), now)  # an average of ones
        got = delay.put_off(Pending(0, value, True, ready(value), Outcome(), now))
        assert got.wait().tolist() == [applied] * 4


def test_averages_of_other_buckets_are_not_applied() -> None:
    steps = _Steps()
    for _ in range(5):
        steps.run()
    assert steps.run((4, 6)) == [40, 0]
    steps.delay.forget()
    assert steps.run((4, 6)) == [0, 0]


def test_memory_of_two_steps_is_apart() -> None:
    steps = _Steps()
    turns = []
    for _ in range(6):
        turns.append(steps.delay.turn)
        steps.run()
    assert turns == [0, 1, 0, 1, 0, 1]

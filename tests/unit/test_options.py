"""What is kept from step to step, and when averages are applied: no transport, futures that the test completes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.needs("torch")


def _value(x: float) -> torch.Tensor:
    import torch

    return torch.full((4,), x)


def _step(
    kept: Any, x: torch.Tensor, *, unsent: bool = False, residual: float | None = None, factor: float = 1.0
) -> torch.Tensor:
    """One step of one bucket; what was contributed. ``residual``: what the engine would have left."""
    from tailbound.torch.memory import Memory

    contribution = kept.begin(0, x, True, Memory().of(0, x.numel(), x.dtype), factor)
    if contribution.prepare is not None:
        contribution.prepare()
    source: torch.Tensor = contribution.source.clone()
    if residual is not None and contribution.residual is not None:
        contribution.residual[:] = residual
    kept.end(0, contribution, Outcome(unsent=unsent))
    return source


@pytest.mark.parametrize("copies", [False, True])
def test_a_late_gradient_counts_half_and_once(copies: bool) -> None:
    """Rule: codec-15."""
    from tailbound.torch.options.contribution import Contributions

    kept = Contributions("carry", False, copies)
    for step in range(2):
        assert _step(kept, _value(step)).tolist() == [step] * 4
    assert _step(kept, _value(8), unsent=True).tolist() == [8] * 4
    assert _step(kept, _value(2)).tolist() == [5] * 4  # half of the sum, not the sum
    assert _step(kept, _value(2)).tolist() == [2] * 4
    assert kept.carried == 1


def test_what_is_late_twice_is_carried_once() -> None:
    """At most one op old: of two late gradients running only the second one comes into the third step (codec-15)."""
    from tailbound.torch.options.contribution import Contributions

    kept = Contributions("carry", False, copies=False)
    for x in (0.0, 0.0):
        _step(kept, _value(x))
    _step(kept, _value(100), unsent=True)
    _step(kept, _value(6), unsent=True)
    assert _step(kept, _value(2)).tolist() == [4] * 4


@pytest.mark.parametrize("case", ["drop", "not finite", "sent", "other buckets", "forgotten", "too early"])
def test_what_is_not_carried(case: str) -> None:
    """Rule: codec-15."""
    from tailbound.torch.options.contribution import Contributions

    kept = Contributions("drop" if case == "drop" else "carry", False, copies=False)
    for x in [0.0] * (1 if case == "too early" else 2):
        _step(kept, _value(x))
    _step(kept, _value(float("nan") if case == "not finite" else 8), unsent=case != "sent")
    if case == "forgotten":
        kept.forget_late(0)
    x = _value(2)
    if case == "other buckets":
        x = x[:3]
    assert _step(kept, x).tolist() == [2] * x.numel()


def test_other_words_than_drop_and_carry_are_refused() -> None:
    from tailbound.torch.options.contribution import Contributions

    with pytest.raises(ConfigError, match='late=\'keep\': give "drop" or "carry"'):
        Contributions("keep", False, copies=False)


@pytest.mark.parametrize("copies", [False, True])
def test_a_residual_is_added_to_the_next_gradient(copies: bool) -> None:
    """From the third step on: before, the same number of entries may mean other parameters."""
    from tailbound.torch.options.contribution import Contributions

    kept = Contributions("carry", True, copies)
    assert _step(kept, _value(1), residual=100).tolist() == [1] * 4
    assert _step(kept, _value(1), residual=100).tolist() == [1] * 4
    assert _step(kept, _value(1), residual=0.25).tolist() == [1] * 4
    assert _step(kept, _value(1), unsent=True).tolist() == [1.25] * 4
    assert _step(kept, _value(2), residual=0.5).tolist() == [1.75] * 4  # half of both gradients, and what was left
    kept.forget()
    assert _step(kept, _value(1)).tolist() == [1] * 4


def test_a_gradient_of_another_type_is_contributed_in_float32() -> None:
    import torch

    from tailbound.torch.options.contribution import Contributions

    for feedback in (False, True):
        kept = Contributions("drop", feedback, copies=False)
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
    contribution = Contributions("drop", False, copies=False).begin(0, gradient, True, bucket)
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
    """Gradients of 1 under scales of 4 and 8; what came too late under one scale counts half under the other."""
    import torch

    from tailbound.torch.options.contribution import Contributions

    kept = Contributions("carry", True, copies)
    scaled = {scale: _value(scale).to(getattr(torch, kind)) for scale in (4, 8)}
    for _ in range(2):
        assert _step(kept, scaled[4], factor=1 / 4).tolist() == [1] * 4
    assert _step(kept, 3 * scaled[4], unsent=True, factor=1 / 4).tolist() == [3] * 4
    assert _step(kept, scaled[8], residual=0.25, factor=1 / 8).tolist() == [2] * 4
    assert _step(kept, scaled[4], factor=1 / 4).tolist() == [1.25] * 4


class _Steps:
    """Averages of numbered steps, applied through ``Delay``; bucket b of step s has the value 10 s + b."""

    def __init__(self) -> None:
        from tailbound.torch.options.delayed import Delay

        self.applied: list[tuple[int, bool]] = []
        self.delay = Delay(lambda outcome, last: self.applied.append((outcome.label, last)))
        self.step = 0

    def run(self, sizes: tuple[int, ...] = (4, 4)) -> list[float]:
        import torch

        from tailbound.torch.options.delayed import Pending

        out = []
        for index, size in enumerate(sizes):
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            label = 10 * self.step + index
            value = torch.full((size,), float(label))
            pending = Pending(index, value, index == len(sizes) - 1, future, Outcome(label=label))
            got = self.delay.exchange(pending)
            future.set_result(value)
            assert got.wait().shape == (size,)
            out.append(float(got.wait()[0]))
        self.step += 1
        return out


def test_an_average_is_applied_one_step_later() -> None:
    steps = _Steps()
    assert [steps.run() for _ in range(7)] == [[0, 1], [10, 11], [20, 21], [0, 0], [30, 31], [40, 41], [50, 51]]
    assert steps.applied == [(10 * s + b, b == 1) for s in (0, 1, 2, 3, 4, 5) for b in (0, 1)]
    assert steps.delay.bubbles == 2
    assert [float(f.wait()[0]) for f in steps.delay.take()] == [60, 61]
    assert steps.applied[-1] == (61, True)
    assert steps.run() == [0, 0]


def test_a_delayed_average_has_the_loss_scale_of_the_step_that_applies_it() -> None:
    import torch

    from tailbound.torch.options.delayed import SETTLING, Delay, Pending, ready

    scale = [8.0]
    delay = Delay(lambda outcome, last: None, lambda: scale[0])
    for now, applied in [(8.0, 8.0)] * SETTLING + [(8.0, 0.0), (4.0, 4.0), (4.0, 4.0), (8.0, 8.0)]:
        scale[0] = now
        value = torch.full((4,), now)  # an average of ones
        got = delay.exchange(Pending(0, value, True, ready(value), Outcome(), now))
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
    parities = []
    for _ in range(6):
        parities.append(steps.delay.parity)
        steps.run()
    assert parities == [0, 1, 0, 1, 0, 1]


def _split(net: torch.nn.Module, groups: list[list[torch.nn.Parameter]]) -> tuple[Any, Any]:
    """A ``Split`` over buckets of ``groups``, a function that hands it a step's gradients, and what was applied."""
    import torch

    from tailbound.torch.finished import Bucket, Layout, _Share
    from tailbound.torch.options.delayed import Pending
    from tailbound.torch.options.split import Split

    layout = Layout()
    for index, group in enumerate(groups):
        shares, offset = [], 0
        for p in group:
            shares.append(_Share(p, offset, p.stride()))
            offset += p.numel()
        layout._buckets[index] = Bucket(
            index, offset, torch.float32, index == len(groups) - 1, tuple(shares), torch.device("cpu")
        )
    applied: list[int] = []
    split = Split(layout, lambda outcome, last: applied.append(outcome.label))
    split.attach(net)

    def step() -> None:
        for index, group in enumerate(groups):
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            gradient = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in group])
            split.begin(index)
            got = split.hold(Pending(index, gradient, index == len(groups) - 1, future, Outcome(label=index)))
            future.set_result(gradient.clone())
            assert got.done()

    return split, (step, applied)


def test_parameters_are_stepped_before_their_own_forward_pass_and_not_later() -> None:
    """The same parameters as without, with momentum and a learning rate that changes after ``step()``."""
    import copy

    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.nn.Linear(8, 2)
    )

    def forward(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model[0](x)  # type: ignore[index]
        return model[2](model[1](y, y, y)[0]).square().sum()  # type: ignore[index, no-any-return]

    plain = copy.deepcopy(net)
    groups = [list(net[2].parameters()) + list(net[1].out_proj.parameters()), list(net[0].parameters())]
    groups[1] += [p for p in net[1].parameters() if all(p is not q for q in groups[0])]
    split, (average, applied) = _split(net, groups)
    ours = torch.optim.Adam(net.parameters(), 0.05)
    handle = ours.register_step_pre_hook(lambda optimizer, *_: split.before_step(optimizer))
    theirs = torch.optim.Adam(plain.parameters(), 0.05)
    for step in range(8):
        x = torch.randn(3, 5, 4)
        for model, optimizer in ((net, ours), (plain, theirs)):
            optimizer.zero_grad()
            forward(model, x).backward()
            before = [p.detach().clone() for p in model.parameters()]
            if model is net:
                average()
            optimizer.step()
            if model is net and step >= 3:
                assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
            for group in optimizer.param_groups:
                group["lr"] *= 0.9  # a scheduler, before the step has really been made
    assert split.by_forward == 2 * 4
    assert split.by_request == 0
    split.finish()
    assert split.by_request == 2
    assert applied == [0, 1] * 3 + [1, 0] * 4 + [0, 1]  # in the order of the forward pass
    for mine, exact in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, exact, rtol=1e-6, atol=1e-7)
    handle.remove()


def test_what_no_forward_pass_uses_is_stepped_before_its_memory_is_used_again() -> None:
    import torch

    torch.manual_seed(0)
    net = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "unused": torch.nn.Linear(2, 2)})
    split, (average, _) = _split(net, [list(net["unused"].parameters()), list(net["used"].parameters())])
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    handle = optimizer.register_step_pre_hook(lambda o, *_: split.before_step(o))
    for step in range(5):
        optimizer.zero_grad()
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        before = net["unused"].weight.detach().clone()
        if step:
            net["used"](torch.ones(1, 2))
        average()
        after_hook = net["unused"].weight.detach().clone()
        optimizer.step()
        assert torch.equal(before, after_hook) == (step < 4)  # step 3 was put off, and came when step 4 began
    assert split.by_request == 1
    handle.remove()

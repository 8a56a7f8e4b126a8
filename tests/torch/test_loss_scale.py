"""The loss scale as a function of the step, against torch's own scaler, and which epoch wins (clock-25, clock-27)."""

from __future__ import annotations

import itertools
import random

import pytest

pytestmark = pytest.mark.needs("torch")

STEP_MASK = (1 << 22) - 1


def test_it_grows_and_backs_off_as_in_torch() -> None:
    """Clean and overflowing steps at random: scale and growth tracker of ``torch.amp.GradScaler`` in every step."""
    import torch

    from tailbound.torch.loss_scale import LossScale

    chance = random.Random(3)
    for first in (0, STEP_MASK - 5):  # step numbers wrap
        theirs = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3)
        parameter = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([parameter], 0.0)
        ours = LossScale(2.0**10, first)
        for step in range(200):
            overflow = chance.random() < 0.15
            theirs.scale(parameter.sum())
            parameter.grad = torch.full((1,), float("inf") if overflow else 1.0)
            theirs.step(optimizer)
            theirs.update()
            now = ours.at(first + step & STEP_MASK, 2.0, 3)
            if overflow:
                ours.write(now * 0.5, first + step + 1 & STEP_MASK)
            following = first + step + 1 & STEP_MASK
            assert ours.at(following, 2.0, 3) == theirs.get_scale()
            assert ours.clean(following) == theirs.state_dict()["_growth_tracker"]


def test_it_stays_where_float32_ends() -> None:
    from tailbound.torch.loss_scale import LossScale

    scale = LossScale(2.0**126, 0)
    assert [scale.at(step, 2.0, 1) for step in range(4)] == [2.0**126, 2.0**127, 2.0**127, 2.0**127]


def test_ranks_that_hear_in_any_order_end_with_the_same() -> None:
    from tailbound.torch.loss_scale import Epoch, LossScale

    epochs = [Epoch(1, 5, 8.0), Epoch(1, 6, 8.0), Epoch(2, 6, 4.0), Epoch(2, 6, 2.0), Epoch(1, STEP_MASK, 8.0)]
    for order in itertools.permutations(epochs):
        scale = LossScale(16.0, 0)
        for epoch in order:
            scale.hear(Epoch.unpack(epoch.pack()))
        assert scale.epoch == Epoch(2, 6, 2.0)
        assert not any(scale.hear(epoch) for epoch in order)


@pytest.mark.parametrize("data", [b"", b"x" * 15, b"\0" * 16, b"\0" * 8 + b"\x7f\xf8" + b"\0" * 6])
def test_nonsense_is_no_epoch(data: bytes) -> None:
    from tailbound.errors import TransportError
    from tailbound.torch.loss_scale import Epoch

    with pytest.raises(TransportError):
        Epoch.unpack(data)

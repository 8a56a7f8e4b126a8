"""Which epoch of the loss scale a rank goes by, with the other ranks played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tailbound.torch.loss_scale import Epoch
from tailbound.torch.scaler import GradScaler
from tailbound.transport.steps import STEP_MASK


def scaler(scale: float, tracker: int) -> GradScaler:
    """Of a rank that has loaded a checkpoint with these and is at step 0 of its own."""
    communicator = SimpleNamespace(step=0, reliable=SimpleNamespace(serve=lambda name, handler: None))
    state: Any = SimpleNamespace(scaler=None, shards=1, shares_scale=False, communicator=communicator, loss_scale=0.0)
    made = GradScaler.__new__(GradScaler)
    super(GradScaler, made).__init__("cpu", scale)
    made.load_state_dict = super(GradScaler, made).load_state_dict  # type: ignore[method-assign]
    made.load_state_dict(made.state_dict() | {"_growth_tracker": tracker})
    made._join(state)
    return made


def test_who_has_come_back_goes_by_what_it_is_told_and_not_by_its_checkpoint() -> None:
    """Its own epoch begins later than the job's, which loaded an older checkpoint, and would win. Rule: clock-32."""
    own = scaler(131072.0, 100)
    told = (0, -1500 & STEP_MASK, 65536.0, 131072.0, 500)
    assert own._scales.epoch.beats(Epoch(*told[:3]))
    own.take_over(told, 650)
    assert (own.epoch, own.newest) == (told, Epoch(*told[:3]))
    assert own.get_scale() == 131072.0
    assert own._growth_tracker is not None
    assert int(own._growth_tracker) == 150


def test_what_others_have_written_meanwhile_still_wins() -> None:
    own = scaler(65536.0, 0)
    own._answer(Epoch(1, 640, 32768.0).pack())
    own.take_over((0, 0, 65536.0, 65536.0, 0), 650)
    assert own.newest == Epoch(1, 640, 32768.0)
    assert own.get_scale() == 32768.0

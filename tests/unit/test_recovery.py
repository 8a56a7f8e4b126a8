"""A rank that is lost and cannot join the others: bounded patience, and an error that says what to do (clock-20)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.needs("torch")


def lost(**fields: Any) -> Any:
    from tailbound.torch.recovery import Recovery

    made = Recovery(0, 2, (200, 0.05))
    made.communicator = SimpleNamespace(lost=True, behind=7)  # type: ignore[assignment]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    "fields",
    [{"together": "all ranks wait for each other"}, {"resync": None}],
    ids=["sharded", "not_attached"],
)
def test_a_rank_that_cannot_join_ends_with_an_error(fields: dict[str, Any]) -> None:
    from tailbound.errors import TransportError

    one = lost(**fields)
    for _ in range(9):
        one.rejoin()
    with pytest.raises(TransportError, match=r"7 steps behind.*Restart this rank's processes"):
        one.rejoin()


def test_a_rank_that_catches_up_is_forgiven() -> None:
    one = lost(together="all ranks wait for each other")
    for _ in range(5):
        for _ in range(8):
            one.rejoin()
        one.communicator.lost = False
        one.rejoin()
        one.communicator.lost = True


def test_what_was_skipped_before_a_forward_pass_is_told_by_the_next_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """So ``batches`` leaves out as many batches."""
    one = lost(resync=object())

    def join(*_: Any) -> int:
        one.communicator.lost = False
        return 6

    monkeypatch.setattr("tailbound.torch.catch_up.jump", join)
    one.rejoin()
    assert one.jump() == 6
    assert one.jump() == 0


def test_steps_whose_averages_were_gone_are_told_by_the_next_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as skipped, not as applied, so that a scheduler is moved on by as many."""
    one = lost(resync=object())
    one.communicator.lost = False
    monkeypatch.setattr(one, "end_step", lambda still: None)
    monkeypatch.setattr("tailbound.torch.catch_up.apply_finished", lambda *_: (2, 3))
    assert one.apply_finished() == 2
    assert one.jump() == 3
    assert one.jump() == 0


def test_a_half_made_step_is_not_given_as_that_after_it() -> None:
    """``hold`` and ``boundary`` leave it open; ``synchronise`` compares it, and leaves it open then."""
    from tailbound.torch.moment import Moment
    from tailbound.transport.reliable import Refusal

    moment, held, met = Moment(), [], []
    resync: Any = SimpleNamespace(
        replica=SimpleNamespace(optimizers=[SimpleNamespace(state={})]),
        boundary=lambda step, still: moment.settle(step),
        synchronise=lambda timeout: bool(met.append(moment.step)) or True,
        moment=moment,
        sound=True,
    )
    one = lost(resync=resync, ended=3)
    one.communicator.hold = held.append
    moment.settle(2)
    one.boundary()
    with one.hold():
        assert held == [True]
    assert (one.ended, moment.step, held) == (3, 2, [True, False])
    assert one.synchronise()
    assert (one.ended, moment.step, met) == (3, 3, [3])
    with pytest.raises(Refusal, match="step 3 is past here"), moment.reading(3, 0.0):
        pass
    one.stepped = True
    with one.hold(), moment.reading(3, 0.0):
        assert one.ended is None


def test_a_lost_rank_joins_where_the_program_says_when_steps_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was left for the forward pass to end, and so it did not look."""
    one = lost()
    looked = []
    monkeypatch.setattr(one, "rejoin", lambda: looked.append(one.ended))
    for step in range(3):
        one.ended = step
        one.boundary()
        one._before_forward()
        one._before_forward()  # an evaluation, say
        assert looked == [None] * (step + 1)

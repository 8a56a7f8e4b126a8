"""How many tries at a key are too many. Rule: auth-8."""

from __future__ import annotations

from tailbound.transport.forgeries import APART, MOST, Forgeries
from tailbound.transport.keys import KeyRing

PERIOD = 2048


def test_tries_are_counted_by_epoch_and_said_once() -> None:
    seen = Forgeries()
    assert not seen.count(MOST, 3)
    assert seen.count(MOST + 1, 3)
    assert not seen.count(MOST + 2, 3)
    assert seen.passed
    assert not seen.count(MOST + 5, 4)
    assert (seen.tried, seen.passed) == (3, False)
    assert not seen.count(2 * MOST + 2, 4)
    assert seen.count(2 * MOST + 3, 4)


def test_another_key_is_asked_for_now_and_then() -> None:
    seen = Forgeries()
    assert [seen.ask(now) for now in (0, 1, APART - 1, APART, APART + 1)] == [True, False, False, True, False]


def ring(at: int = 0) -> KeyRing:
    return KeyRing(bytes(range(32)), 7, 64, at, PERIOD)


def test_a_turn_makes_all_epochs_one_later() -> None:
    """Two keys are in force all the time, and those of the ranks a few steps before and behind are among them."""
    for since in (100, 1200):
        ranks, left = [ring(), ring(), ring()], [0, 3, 6]  # so many steps behind
        for step in range(3 * PERIOD):
            for made, behind in zip(ranks, left, strict=True):
                at = step - behind
                if step == since - 10:
                    assert made.may_turn
                    made.foresee(1)
                if at >= 0:
                    made.advance(at, int(at >= since))
            sent = [made.of(made.at, made.turns).tobytes() for made in ranks]
            for made in ranks:
                assert {key.tobytes() for key in made.both} >= set(sent), (since, step)
                assert made.now.tobytes() in {key.tobytes() for key in made.both}
        assert {made.epoch for made in ranks} == {3}


def test_no_turn_comes_near_another_change_of_keys() -> None:
    made, apart = ring(), PERIOD // 32
    for step in range(1, 2 * PERIOD):
        made.advance(step, int(step >= 300))
        into = step % PERIOD
        assert made.may_turn == (apart <= into < PERIOD - apart and not 300 <= step < 300 + apart)


def test_a_turn_that_was_foreseen_and_does_not_come() -> None:
    made = ring(100)
    first = {key.tobytes() for key in made.both}
    made.foresee(1)
    made.foresee(0)
    assert {made.now.tobytes(), made.of(100, 1).tobytes()} == {key.tobytes() for key in made.both}
    for step in range(101, PERIOD + 20):
        made.advance(step, 0)
    assert {key.tobytes() for key in made.both} >= {made.now.tobytes()}
    assert first & {key.tobytes() for key in made.both}


def test_who_comes_back_has_the_keys_of_the_others() -> None:
    made, late = ring(), KeyRing(bytes(range(32)), 7, 64, 300, PERIOD, turns=1)
    for step in range(1, 301):
        made.advance(step, int(step >= 200))
    assert made.now.tobytes() == late.now.tobytes()
    assert made.epoch == late.epoch == 1

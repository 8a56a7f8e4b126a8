"""Rounds of re-synchronisation among threads: who asks whom, what is taken, and what makes a rank sound again.

Rules: clock-21, codec-13.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.needs("torch")

COOKIE, PATIENCE = 77, 60


class World:
    """Ranks with equal models, all stepping at once; a step adds the same to all parameters of all ranks."""

    def __init__(self, ranks: int, entries: int, **settings: Any) -> None:
        import torch

        from tailbound.torch.replica import Replica
        from tailbound.torch.resync import Resync
        from tailbound.transport.reliable import Reliable

        self.paths = [Reliable("127.0.0.1") for _ in range(ranks)]
        self.models = []
        self.ranks: list[Any] = []
        self.live = set(range(ranks))
        self.views: dict[int, set[int]] = {}  # of ranks that know of others than ``live``
        self.step = -1
        self._threads = ThreadPoolExecutor(ranks)
        settings = {"period": 0, "threshold": 1e9, "share": 1e6} | settings
        for rank, path in enumerate(self.paths):
            net = torch.nn.Linear(entries, 1, bias=False)
            torch.nn.init.ones_(net.weight)
            self.models.append(net)
            path.start(COOKIE, rank, [("127.0.0.1", one.port) for one in self.paths])
            peers: Callable[[], list[int]] = lambda rank=rank: sorted(self.views.get(rank, self.live) - {rank})  # type: ignore[misc]  # noqa: E731
            self.ranks.append(Resync(path, Replica(net, ranks), rank, ranks, COOKIE, peers, **settings))

    def __getitem__(self, rank: int) -> Any:
        return self.ranks[rank]

    def run(self, steps: int, only: set[int] | None = None) -> None:
        """All live ranks take ``steps`` steps."""
        for _ in range(steps):
            self.step += 1
            slots = list(self._threads.map(self._one, sorted(self.live if only is None else only), timeout=PATIENCE))
            for slot in slots:  # real steps are longer than an answer takes
                assert slot is None or only is not None or slot.ready.wait(PATIENCE)

    def _one(self, rank: int) -> Any:
        slot = self.ranks[rank]._slot
        self.ranks[rank].moment.disturb()
        self.models[rank].weight.data.add_(0.001)
        self.ranks[rank].boundary(self.step)
        return slot

    def damage(self, rank: int, by: float, entries: slice = slice(None)) -> None:
        """A result has been missed: other parameters than the others'."""
        self.ranks[rank].moment.disturb()  # slices of the step before may still be compared
        self.models[rank].weight.data[0, entries] += by
        self.ranks[rank].note_missing(1)

    def equal(self) -> bool:
        first = self.models[0].weight
        return all(bool((model.weight == first).all()) for model in self.models)

    def counts(self, name: str) -> list[int]:
        return [one.counters[name] for one in self.ranks]

    def close(self) -> None:
        for one, path in zip(self.ranks, self.paths, strict=True):
            one.close()
            path.close()
        self._threads.shutdown()


@contextmanager
def world(ranks: int, entries: int = 4 * 16384, **settings: Any) -> Iterator[World]:
    made = World(ranks, entries, **settings)
    try:
        yield made
    finally:
        made.close()


def test_ranks_that_miss_nothing_say_nothing() -> None:
    with world(3, period=4) as w:
        w.run(16)
        assert w.counts("marks_given") == [0, 0, 0]
        assert w.counts("rounds") == [0, 0, 0]
        assert all(one.sound for one in w.ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_damaged_rank_takes_from_the_sound_ones(ranks: int) -> None:
    with world(ranks, period=16) as w:
        assert w[0].replica.slices == 4
        w.run(4)
        w.damage(1, 0.5, slice(0, 16384))  # the first slice only
        w.run(8)
        assert not w.equal()
        w.run(9)  # up to and with the window 16..19, and one more
        assert w.equal()
        assert [one.sound for one in w.ranks] == [True] * ranks
        assert w.counts("slices_taken") == [int(rank == 1) for rank in range(ranks)]
        assert w[1].counters["slices_equal"] == 3
        assert w[1].counters["bytes_taken"] == 65536


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_are_all_damaged_take_turns(ranks: int) -> None:
    with world(ranks, period=16) as w:
        w.run(2)
        for rank in range(ranks):
            w.damage(rank, 0.1 * (rank + 1))
        w.run(19)
        assert w.equal()
        assert all(one.sound for one in w.ranks)
        assert sum(w.counts("slices_taken")) == 4 * (ranks - 1)


@pytest.mark.parametrize("since", [2, 15, 17])
def test_ranks_that_know_of_different_ones_do_not_take_themselves_for_equal(since: int) -> None:
    """They take turns with others and so get other slices; a rank that some hold for dead is such a case."""
    with world(3, period=16) as w:
        w.run(2)
        for rank in range(3):
            w.damage(rank, 0.1 * (rank + 1))
        w.run(since - 2)
        w.views[0] = {0, 1}
        for _ in range(21 - since):
            w.run(1)
            weights = {one.weight.data.numpy().tobytes() for one, r in zip(w.models, w.ranks, strict=True) if r.sound}
            assert len(weights) <= 1
        del w.views[0]
        w.run(20)
        assert w.equal()
        assert all(one.sound for one in w.ranks)


def test_a_rank_that_takes_turns_alone_does_not_take_itself_for_equal() -> None:
    """Nobody takes the slices that it keeps; the others come to its next round."""
    with world(3, period=16) as w:
        w.run(2)
        for rank in range(3):
            w.damage(rank, 0.1 * (rank + 1))
        w.run(1)
        w[2]._told = True
        w.run(4)  # its window is 4..7
        assert w.counts("rounds") == [0, 0, 1]
        w.run(3)
        assert not any(one.sound for one in w.ranks)
        w.run(9)  # before the next one that is due is over
        assert w.step < 20
        assert w.equal()
        assert all(one.sound for one in w.ranks)


def test_damage_during_a_round_leaves_the_rank_unsound() -> None:
    with world(2, period=8) as w:
        w.run(4)
        w.damage(1, 0.5)
        w.run(6)  # the window is 8..11
        w.damage(1, 0.25)
        w.run(3)
        assert not w[1].sound
        w.run(8)
        assert w[1].sound
        assert w.equal()


def test_a_donor_that_is_damaged_during_the_round_makes_nobody_sound() -> None:
    with world(2, period=8) as w:
        w.run(4)
        w.damage(1, 0.5)
        w.run(6)
        w.damage(0, 0.25)
        w.run(3)
        assert not w[0].sound
        assert not w[1].sound
        w.run(16)
        assert w[0].sound
        assert w[1].sound
        assert w.equal()


def test_drift_is_measured_and_starts_a_round() -> None:
    """Rules: codec-13, codec-14."""
    with world(2, threshold=0.05) as w:
        w.run(1)
        w.damage(1, 0.02)
        w.run(9)
        assert w[1].drift.relative == pytest.approx(0.02, rel=0.2)
        assert w.counts("rounds") == [0, 0]
        w.damage(1, 0.2)
        w.run(12)
        assert w[1].counters["rounds"] >= 1
        assert w.equal()
        assert w[1].drift.relative == 0


def test_a_donor_that_stands_still_costs_a_wait_and_no_more() -> None:
    with world(2, period=4, share=1e-9) as w:
        w.run(2)
        w.damage(1, 0.5)
        w.run(6, only={1})  # rank 0 is stopped
        assert w[1].counters["slices_missed"] >= 1
        assert not w[1].sound
        assert not w.equal()


def synchronise(w: World, timeout: float = PATIENCE, ranks: Sequence[int] = ()) -> list[bool]:
    """All ranks at once, each with a thread of its own."""
    chosen = [w[rank] for rank in ranks] if ranks else w.ranks
    with ThreadPoolExecutor(len(chosen)) as threads:
        return list(threads.map(lambda one: one.synchronise(timeout), chosen))


def test_synchronising_takes_the_state_of_a_sound_rank() -> None:
    with world(3) as w:
        w.run(3)
        for rank in (0, 2):
            w.damage(rank, 0.3 * (rank + 1))
        assert synchronise(w) == [True] * 3
        assert w.equal()
        assert all(one.sound for one in w.ranks)
        assert w.counts("slices_taken") == [4, 0, 4]
        assert synchronise(w) == [True] * 3  # once more after the same step
        assert w.counts("slices_taken") == [4, 0, 4]


def test_synchronising_without_a_sound_rank_follows_the_turn() -> None:
    with world(3) as w:
        w.run(3)  # after step 2 it is rank 2's turn
        for rank in range(3):
            w.damage(rank, 0.3 * (rank + 1))
        assert synchronise(w) == [True] * 3
        assert w.equal()
        assert w.counts("slices_taken") == [4, 4, 0]
        assert all(one.sound for one in w.ranks)  # all have been compared


def test_a_rank_that_hears_nobody_is_not_synchronised() -> None:
    """However sound it is: nobody knows what the others hold."""
    with world(3) as w:
        w.run(2)
        assert synchronise(w, 0.4, [1]) == [False]
        w.damage(0, 0.5)
        assert synchronise(w, 2.0, [0, 1]) == [False] * 2  # rank 2 does not come
        assert bool((w.models[0].weight == w.models[1].weight).all())  # and these two are equal all the same
        w.live = {1}
        assert synchronise(w, PATIENCE, [1]) == [True]  # nobody else is left


def test_nobody_waits_for_a_rank_that_went_on_without_synchronising() -> None:
    with world(2) as w:
        w.run(2)
        w.run(1, only={0})
        begun = time.monotonic()
        assert not w[1].synchronise(2 * PATIENCE)
        assert time.monotonic() - begun < PATIENCE


def test_sound_ranks_are_compared_too(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was missed, and still they differ: what most of them hold is taken, and they say who held what."""
    with world(4, entries=8 * 16384) as w:
        w.run(3)  # the turn is rank 2's
        w.models[2].weight.data += 0.5
        assert all(one.sound for one in w.ranks)
        assert synchronise(w) == [True] * 4
        assert w.equal()
        assert w.counts("slices_taken") == [0, 0, 8, 0]
        assert "of rank(s) [2] are not those of rank" in caplog.text


def test_who_loses_a_result_in_the_step_that_is_compared_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check is planned before its step; neither rank is to take the loss for a fault of memory (clock-33)."""
    from tailbound.torch.digests import Check
    from tailbound.transport.reliable import Refusal

    monkeypatch.setattr("tailbound.torch.digests._WAIT", 0.5)
    with world(2) as w:
        w.run(2)
        both = list(w._threads.map(lambda rank: w[rank]._digests.compare(Check(1, 1, 1 - rank, PATIENCE)), range(2)))
        assert both == [[], []]
        w.damage(1, 0.5)
        w.run(1)
        with pytest.raises(Refusal, match="lost before the end of step 2"):
            w[1]._digests.compare(Check(2, 2, 0, PATIENCE))
        with pytest.raises(Refusal, match="compares nothing"):
            w[0]._digests.compare(Check(2, 2, 1, PATIENCE))
        assert w[0].sound


def test_who_is_not_to_compare_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for compare in (True, False):
        with world(2, period=4, compare=compare) as w:
            asked: list[Any] = []
            monkeypatch.setattr(w[0]._digests, "ask", asked.append)
            w.run(8)
            assert [check.step for check in asked] == ([*range(1, 9)] if compare else [])


def test_other_digests_are_warned_of_once_a_window(caplog: pytest.LogCaptureFixture) -> None:
    from tailbound.torch.digests import Check

    with world(2) as w:
        for step in (4, 5, 7, 8):
            w[0]._compared(Check(step, step % 4, 1, PATIENCE), None)
        assert [caplog.text.count(f"after step {step} ") for step in (4, 5, 7, 8)] == [1, 0, 0, 1]
        assert w[0].counters["digests_unlike"] == 4
        assert not w[0].sound


def test_buffers_and_plain_values_of_optimizers_are_compared() -> None:
    """Running statistics are every rank's own while it trains; a learning rate that differs is a rank gone astray."""
    import torch

    with world(3) as w:
        optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in w.models]
        for one, optimizer in zip(w.ranks, optimizers, strict=True):
            one.replica.adopt(optimizer)
        w.run(2)
        optimizers[0].param_groups[0]["lr"] = 0.2
        assert synchronise(w) == [True] * 3
        assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.1] * 3
        assert w.counts("whole_taken") == [1, 0, 0]


def test_a_round_brings_other_plain_values_too() -> None:
    """Slices do not carry an optimizer's counts: who finds others takes everything at the end of the round."""
    import torch

    with world(2, period=8) as w:
        optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in w.models]
        for one, optimizer, net in zip(w.ranks, optimizers, w.models, strict=True):
            one.replica.adopt(optimizer)
            optimizer.state[net.weight]["count"] = 3
        w.run(4)
        optimizers[1].state[w.models[1].weight]["count"] = 2
        w.damage(1, 0.5)
        w.run(10)
        assert w.equal()
        assert w[1].sound
        assert optimizers[1].state[w.models[1].weight]["count"] == 3
        assert w[1].counters["whole_taken"] == 1


def test_who_has_heard_a_standing_has_not_heard_the_next_one_even_if_it_is_the_same() -> None:
    """A late answer of the first round counted for the second, and a rank closed before another had asked it."""
    from tailbound.torch.meeting import _ASK, Meetings, Standing

    served: list[Callable[[bytes], Sequence[bytes]]] = []
    path: Any = SimpleNamespace(serve=lambda _, handler: served.append(handler), before_close=lambda _: None)
    moment: Any = SimpleNamespace(step=2)
    meetings = Meetings(path, 0, lambda: {1}, moment)
    same = Standing(True, bytes(16), bytes(16), ())
    for number in (0, 1):
        meetings.publish(2, number, same)
    served[0](_ASK.pack(2, 0, 1, 0))
    assert meetings._meetings[-1].heard_by == set()
    served[0](_ASK.pack(2, 1, 1, 0))
    assert meetings._meetings[-1].heard_by == {1}


def test_who_closes_waits_until_those_who_synchronise_with_it_are_through() -> None:
    with world(3) as w:
        w.run(3)
        w.damage(1, 0.5)
        through, gather = threading.Barrier(3), w[2]._meetings.gather

        def slow(*arguments: Any) -> Any:  # the others are through and about to close before rank 2 asks anybody
            if arguments[1] == 1:  # it has published its standing of the second round, in which all are equal
                through.wait(PATIENCE)
            return gather(*arguments)

        w[2]._meetings.gather = slow

        def leave(rank: int) -> bool:
            well: bool = w[rank].synchronise(PATIENCE)
            if rank != 2:
                through.wait(PATIENCE)
            w[rank].close()
            return well

        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(leave, range(3))) == [True] * 3
        assert w.equal()


def test_ranks_speak_of_themselves_while_others_look() -> None:
    """The thread that asks notes what it hears while the training thread looks who is sound."""
    with world(3) as w:
        w.run(2)
        one = w[0]
        one._heard[1] = one._heard[2] = _said(1)
        distance = resync_module().step_distance

        def hearing(a: int, b: int) -> int:
            one._heard[0] = _said(1)
            return int(distance(a, b))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tailbound.torch.resync.step_distance", hearing)
            assert {1, 2} <= one._said(2).keys()


def resync_module() -> Any:
    import tailbound.torch.resync

    return tailbound.torch.resync


def _said(step: int) -> Any:
    return resync_module()._Said(step, True)


def test_nobody_gives_a_state_of_another_step() -> None:
    with world(2) as w:
        w.run(2)
        w.damage(1, 0.5)
        w.run(1, only={0})
        assert not w[1].adopt_any(3, 0.3)
        assert w[1]._adopt(0, 1, PATIENCE) is None
        assert w[1].counters["whole_failed"] == 2
        assert not w.equal()
        assert w[1].adopt_any(1, PATIENCE) == 2  # the present one is later and will do
        assert w.equal()


@pytest.mark.parametrize("seed", range(20))
def test_requests_that_make_no_sense_are_refused(seed: int) -> None:
    from tailbound.transport.reliable import Refusal

    rng = np.random.default_rng(seed)
    with world(2, entries=1000) as w:
        w.run(1)
        for name in ("mark", "slice", "whole"):
            noise = rng.integers(0, 256, int(rng.integers(0, 30)), np.uint8).tobytes()
            if len(noise) == 7:
                noise += b"x"
            with pytest.raises(Refusal, match=f"a request of {len(noise)} bytes"):
                w.paths[1].pull(0, name, noise, PATIENCE)
            with pytest.raises(Refusal, match="there are 2 slices here"):
                w.paths[1].pull(0, name, struct.pack("!IHB", 0, 2, 0), PATIENCE)
        w[0].moment.disturb()
        with pytest.raises(Refusal, match="step 0 is past"):
            w.paths[1].pull(0, "slice", struct.pack("!IHB", 0, 0, 0), PATIENCE)

"""Replicas that came apart, among threads: who asks whom, what is taken, and what makes a rank sound again.

Rules: clock-21, codec-13.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from solo import Kept
from support import await_that
from tailbound.errors import LayoutError, TransportError
from tailbound.transport.membership import Membership
from tailbound.transport.reliable import Refusal, Reliable, Unreachable

pytest.importorskip("torch", reason="missing capability 'torch'")

import torch

from tailbound.torch import resync
from tailbound.torch.finished import Layout
from tailbound.torch.replica import Replica
from tailbound.torch.resync import Resync
from tailbound.torch.standing import _ASK, _HEAD, _HERE, _NOT_YET, _ROUND, Standing, Standings

COOKIE, PATIENCE = 77, 60
#: Entries of a slice: there are four.
SLICE = 16384


class World:
    """Ranks with equal models, all stepping at once; a step adds the same to all parameters of all ranks."""

    def __init__(self, ranks: int, entries: int, **settings: Any) -> None:
        self.paths = [Reliable("127.0.0.1") for _ in range(ranks)]
        self.models = []
        self.ranks: list[Any] = []
        self.states: list[Any] = []
        self.live = set(range(ranks))
        self.views: dict[int, set[int]] = {}  # of ranks that know of others than ``live``
        self.closed: set[int] = set()  # have said goodbye
        self.late: set[int] = set()  # are silent, and were heard a few steps ago
        self.step = -1
        self.mixes = 0.0  # of the mean of all parameters, how much a step adds to each
        self._threads = ThreadPoolExecutor(ranks)
        settings = {"period": 0, "share": 1e6} | settings
        quorum = settings.pop("quorum", Membership(ranks, 0).quorum)
        for rank, path in enumerate(self.paths):
            net = torch.nn.Linear(entries, 1, bias=False)
            torch.nn.init.ones_(net.weight)
            self.models.append(net)
            path.start(COOKIE, rank, [("127.0.0.1", one.port) for one in self.paths])
            members = SimpleNamespace(
                alive=lambda _, *silent, rank=rank: self.views.get(rank, self.live) | (self.late if silent else set()),
                gone=self.closed,
                quorum=quorum,
            )
            job = SimpleNamespace(membership=members, steps=SimpleNamespace(own=0))
            own = SimpleNamespace(rank=rank, ranks=ranks)
            communicator: Any = SimpleNamespace(reliable=path, config=own, job=job, elastic=False, part=None)
            state: Any = SimpleNamespace(scaler=None, absence=SimpleNamespace(abstaining=False))
            self.states.append(state)
            replica = Replica(net, ranks)
            self.ranks.append(Resync(communicator, replica, Layout(), lambda state=state: state, **settings))

    def __getitem__(self, rank: int) -> Any:
        return self.ranks[rank]

    def run(self, steps: int, only: set[int] | None = None) -> None:
        """All live ranks take ``steps`` steps, and hear all answers."""
        for _ in range(steps):
            self.step += 1
            list(self.each(self._one, self.live if only is None else only))
            list(self.each(self.heard))

    def each(self, what: Callable[[int], Any], ranks: Iterable[int] | None = None) -> Iterator[Any]:
        """``what`` of all ranks at once."""
        return self._threads.map(what, range(len(self.ranks)) if ranks is None else sorted(ranks), timeout=PATIENCE)

    def heard(self, rank: int) -> None:
        """What ``rank`` asks in the background is answered."""
        if not self.paths[rank]._over.is_set():
            over = threading.Event()
            self.ranks[rank]._tasks.put(over.set)
            assert over.wait(PATIENCE)

    def _one(self, rank: int) -> None:
        self.ranks[rank].moment.disturb()
        weight = self.models[rank].weight.data
        weight.add_(0.001 + self.mixes * float(weight.mean()))
        self.ranks[rank].boundary(self.step)

    def damage(self, rank: int, by: float, entries: slice = slice(None)) -> None:
        """A result has been missed: other parameters than the others'."""
        self.ranks[rank].moment.disturb()  # slices of the step before may still be compared
        self.models[rank].weight.data[0, entries] += by
        self.ranks[rank].unsound()

    def watch(self, rank: int, ask: Callable[..., None]) -> None:
        """From now on ``ask`` gets what ``rank`` asks before it does, and may raise."""
        pull = self.paths[rank].pull
        self.paths[rank].pull = lambda *given: ask(*given) or pull(*given)  # type: ignore[func-returns-value, method-assign]

    def cut(self, rank: int, other: int) -> None:
        """From now on ``rank`` does not reach ``other``."""

        def part(asked: int, *_: Any) -> None:
            if asked == other:
                raise Unreachable(f"rank {rank} does not reach rank {other}")

        self.watch(rank, part)

    def equal(self) -> bool:
        first = self.models[0].weight
        return all(bool((model.weight == first).all()) for model in self.models)

    def counts(self, name: str) -> list[int]:
        return [one.counters[name] for one in self.ranks]

    def close(self) -> None:
        for path in self.paths:
            path.close()
        self._threads.shutdown()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is."""
    monkeypatch.setattr("tailbound.torch.resync._LEAST_WAIT", float(PATIENCE))
    monkeypatch.setattr("tailbound.torch.standing._SAY", float(PATIENCE))


def optimizers_of(w: World) -> list[Any]:
    """An optimizer of each model, known to its rank."""
    made = [torch.optim.SGD(net.parameters(), 0.1) for net in w.models]
    for one, optimizer in zip(w.ranks, made, strict=True):
        one.replica.adopt(optimizer)
    return made


def extend(w: World, add: Callable[[int, Any], None]) -> None:
    """Models have more than their parameters; ``add`` gets a rank and its model."""
    for rank, (one, net) in enumerate(zip(w.ranks, w.models, strict=True)):
        add(rank, net)
        one.replica = Replica(net, len(w.ranks))


@contextmanager
def world(ranks: int, steps: int = 0, entries: int = 4 * SLICE, **settings: Any) -> Iterator[World]:
    made = World(ranks, entries, **settings)
    try:
        made.run(steps)
        yield made
    finally:
        made.close()


#: Steps from a lost result to the end of its repair: the rank asks, chooses, and takes.
REPAIRED = 3


@pytest.mark.parametrize(
    ("ranks", "damaged", "mixes", "taken", "led"),
    [
        (2, {1}, 0.0, [0, 1], 0),
        (4, {1}, 0.0, [0, 1, 0, 0], 0),
        # all after one step: an optimizer that mixes entries carried stale ones into what had been taken before
        (4, {1}, 0.1, [0, 4, 0, 0], 0),
        (3, {0, 2}, 0.0, [4, 0, 4], 0),
        (3, {0, 1, 2}, 0.0, [0, 4, 4], 1),
    ],
)
def test_a_damaged_rank_takes_what_differs_from_a_sound_one_or_from_the_lowest(
    ranks: int, damaged: set[int], mixes: float, taken: list[int], led: int
) -> None:
    """States: sound to unsound, unsound to sound."""
    with world(ranks, 2) as w:
        for rank in damaged:  # in the first slice only, where one is damaged
            w.damage(rank, 0.1 * (rank + 1), slice(0, SLICE if len(damaged) == 1 else 4 * SLICE))
        w.run(REPAIRED - 1)
        assert [one.sound for one in w.ranks] == [
            rank not in damaged or bool(led and not rank) for rank in range(ranks)
        ]
        w.mixes = mixes  # all slices differ from now on
        w.run(1 if len(damaged) == 1 else 8)
        assert w.equal()
        assert [(one.sound, one.about_to_take) for one in w.ranks] == [(True, False)] * ranks
        assert (w.counts("slices_taken"), w.counts("led")) == (taken, [led] + [0] * (ranks - 1))


@pytest.mark.parametrize("mixes", [0.0, 0.1])
def test_a_large_state_is_taken_in_parts_and_at_last_at_once(mixes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once takes longer than the ring lasts; in parts it is never equal where an optimizer mixes entries."""
    monkeypatch.setattr("tailbound.torch.resync._PARTS_MOST", 5)
    with world(2, 2) as w:
        w.mixes = mixes
        w.damage(1, 0.5)
        takes = 0
        while not w[1].sound:
            w[1]._most = 1
            w.run(1)
            takes = w[1].counters["states_taken"]
            assert w[1].counters["slices_taken"] == takes if not w[1].sound else w.equal()
        assert takes == (6 if mixes else 4)


def test_a_giver_that_is_damaged_meanwhile_gives_nothing() -> None:
    with world(3, 4) as w:
        w.damage(1, 0.5)
        w.run(REPAIRED - 1)
        w.damage(donor := w[1]._donor, 0.25)
        w.run(1)
        assert w[1].counters["takes_failed"] == 1
        w.run(2 * REPAIRED)
        assert all(one.sound for one in w.ranks)
        assert w.equal()
        assert w[donor].counters["states_taken"] == 1


@pytest.mark.parametrize("share", [0.0, 1e-6])
def test_a_rank_spends_a_share_of_its_time_on_taking(share: float) -> None:
    with world(2, share=share) as w:
        for _ in range(2):
            w.run(1)
            w.damage(1, 0.5)
            w.run(2 * REPAIRED)
        assert w[1].counters["states_taken"] == bool(share)
        assert not w.equal()
        assert synchronize(w) == [True] * 2
        assert w.equal()


def test_frozen_parameters_go_with_a_whole_state_where_they_differ() -> None:
    with world(2) as w:
        extend(w, lambda _, net: setattr(net, "frozen", torch.nn.Parameter(torch.ones(4 * SLICE), requires_grad=False)))
        w.run(2)
        for change, sent in ((0.0, 4), (0.25, 8)):
            w.models[0].frozen.data += change
            w.damage(1, 0.5)
            before = w[1].counters["slices_taken"]
            assert w[1].adopt_any(w.step, PATIENCE) == w.step
            assert w[1].counters["slices_taken"] - before == sent
            assert w.equal()
            assert torch.equal(w.models[0].frozen, w.models[1].frozen)
        w.models[1].frozen.data -= 0.5
        assert synchronize(w) == [True] * 2
        assert torch.equal(w.models[0].frozen, w.models[1].frozen)


def test_running_statistics_are_no_difference_until_all_meet_and_have_those_of_rank_0() -> None:
    """As by DDP's broadcast; they were those of another rank each time."""
    with world(3) as w:
        extend(w, lambda rank, net: net.register_buffer("mean", torch.full((3,), float(rank))))
        w.run(2)
        w[1].unsound()
        w.run(REPAIRED)
        assert w[1].sound
        assert w[1].counters["slices_taken"] == 0
        for _ in range(3):
            w.run(1)
            for rank, net in enumerate(w.models):
                net.mean.add_(float(rank) + w.step)
            kept = w.models[0].mean.tolist()
            assert synchronize(w) == [True] * 3
            assert [net.mean.tolist() for net in w.models] == [kept] * 3


def test_extra_state_comes_with_a_whole_state() -> None:
    """A rank that had jumped kept its own scheduler, whose learning rate lagged for good."""
    with world(2, 2) as w:
        extra_state = [Kept(7), Kept(3)]
        for one, each in zip(w.ranks, extra_state, strict=True):
            one._extra_state = {"scheduler": each}
        scalers = [Kept(2.0), Kept(8.0)]
        for state, scaler in zip(w.states, scalers, strict=True):
            state.scaler = scaler
        w.damage(1, 0.5)
        assert w[1].adopt_any(1, PATIENCE) == 1
        assert extra_state[1].kept == 7
        assert scalers[1].kept == 2.0
        assert w.equal()
        extra_state[0].kept = lambda: None  # cannot be given
        assert w[1].adopt_any(1, 0.3) is None
        w[0]._extra_state = {}
        with pytest.raises(LayoutError, match=r"extra_state=\['scheduler'\] on some ranks only"):
            w[1].adopt_any(1, PATIENCE)


def test_a_state_of_a_rank_that_was_lost_itself_is_not_taken() -> None:
    """Where no sound rank answered, it was, and the rank that took it contributed from then on."""
    with world(3, 2) as w:
        for rank in (1, 2):
            w.damage(rank, 0.1 * rank)
            w[rank].moment.settle(1)
        w.cut(1, 0)  # the one that is sound
        w.states[2].absence.abstaining = True
        assert w[1].adopt_any(1, 1.0) is None
        w.states[2].absence.abstaining = False  # it has only missed something
        assert w[1].adopt_any(1, PATIENCE) == 1
        assert bool((w.models[1].weight == w.models[2].weight).all())
        assert not w[1].sound


def test_a_take_that_fails_leaves_no_state_of_the_step_before() -> None:
    """It was settled for a moment, while the parameters were those of the next step already."""
    with world(2, 2) as w:
        settled: list[int] = []
        settle = w[1].moment.settle
        w.cut(1, 0)
        w[1].moment.settle = lambda step: settled.append(step) or settle(step)
        w[1].moment.disturb()  # the update of step 2
        w[1]._donor = 0
        w[1].boundary(1, still=False)  # gradients may be averaged several times for a step of the optimizer
        assert w[1].about_to_take
        settled.clear()
        w[1].moment.disturb()
        w[1].boundary(2)
        assert w[1].counters["takes_failed"] == 1
        assert settled == [2]
        assert w[1]._try(0, 3, 0.1) is None  # between two steps
        assert settled == [2, 2]


@pytest.mark.parametrize(("rate", "scale"), [(0.05, 2.0), (0.1, 8.0)])
def test_learning_rates_and_loss_scales_that_differ_are_told_as_such(
    rate: float, scale: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The log said memory errors, slices were taken, and the rank was sound again. A scale stayed another one.

    Of a state of another form some slices were of another step's. Rule: clock-21.
    """
    with world(3) as w:
        optimizers = optimizers_of(w)
        scalers = [Kept(2.0), Kept(2.0), Kept(scale)]
        w.run(2)
        optimizers[2].param_groups[0]["lr"] = rate
        for one, state, optimizer, scaler in zip(w.ranks, w.states, optimizers, scalers, strict=True):
            state.scaler = scaler
            one.replica.note_rates(optimizer, scaler.kept)
        w.run(1)
        list(w.each(lambda rank: w[rank]._compare_slice(2, 1, [(rank + 1) % 3, (rank + 2) % 3])))
        assert "this rank differs from the others after step 2, without a lost result: their learning" in caplog.text
        assert "memory errors" not in caplog.text
        assert [one.sound for one in w.ranks] == [True, True, False]
        for optimizer, net in zip(optimizers[:2], w.models, strict=False):  # nor has it stepped there
            optimizer.state[net.weight]["momentum_buffer"] = torch.ones_like(net.weight)
        w.run(REPAIRED - 1)
        w[2]._most = 1
        w.run(1)
        assert w[2].counters["whole_taken"] == 1
        assert (optimizers[2].param_groups[0]["lr"], scalers[2].kept) == (0.1, 2.0)
        assert w[2].sound, "a state of another form is taken with all slices"


def test_who_hears_nobody_does_not_lead() -> None:
    """It may be the one that is cut off; and a peer that does not answer may be sound."""
    with world(3, 2) as w:
        for rank in range(3):
            w.damage(rank, 0.1 * (rank + 1))
        w.live = {0}
        w.run(4)
        w.live = {0, 1, 2}
        w[2]._reliable.close()
        w.run(6, only={0, 1})
        assert not any(one.sound for one in w.ranks)


@pytest.mark.parametrize("reached", [True, False])
def test_who_was_heard_a_few_steps_ago_is_asked_before_another_one_leads(reached: bool) -> None:
    """It may be sound, and does not know yet that it was left behind (clock-21); if it answers so, others take that."""
    with world(3, 2) as w:
        for rank in (0, 1):
            w.damage(rank, 0.1 * (rank + 1))
        w.live, w.late = {0, 1}, {2}
        for rank in () if reached else (0, 1):
            w.cut(rank, 2)
        w.run(6, only={0, 1, 2} if reached else {0, 1})
        assert [w[rank].sound for rank in (0, 1)] == [reached] * 2
        w.late = set()
        w.run(8, only={0, 1})
        assert [w[rank].sound for rank in (0, 1)] == [True] * 2
        assert w.counts("led") == [not reached, 0, 0]


def test_who_has_left_steps_behind_asks_again_before_it_leads() -> None:
    """Others took it for dead meanwhile, and one of them may lead by now."""
    with world(2, 2) as w:
        for rank in (0, 1):
            w.damage(rank, 0.1 * (rank + 1))
        w.run(1)
        w[0].part()
        w.run(1)
        assert w.counts("led") == [0, 0]
        w.run(1)
        assert w.counts("led") == [1, 0]


def apart(w: World, entries: slice, damaged: set[int]) -> None:
    """Two parts of the job know of each other no more, and one of them follows the lowest of its damaged ranks."""
    w.run(3)
    w.views = {rank: damaged if rank in damaged else w.live - damaged for rank in w.live}
    for rank in damaged:
        w.damage(rank, 0.1 * (rank + 1), entries)
    w.run(12)
    assert all(one.sound for one in w.ranks)
    assert not w.equal()
    w.views = {}


def stopped(w: World, entries: slice) -> None:
    """Rank 2 has missed nobody, and knows of no lost result of its own: it learns by the others' question."""
    w.run(3)
    w.live, w.views = {0, 1}, {2: {0, 1, 2}}
    for rank in (0, 1):
        w.damage(rank, 0.1 * (rank + 1), entries)
    w.run(8)
    w.live = {0, 1, 2}


@pytest.mark.parametrize(
    ("ranks", "part", "yielding"),
    [
        (4, partial(apart, damaged={1, 2, 3}), {0}),  # the lowest was away
        (5, partial(apart, damaged={0, 1}), {0, 1}),  # most were away
        (4, partial(apart, damaged={0, 1}), set()),  # halves: by the step
        (3, stopped, {2}),
    ],
)
@pytest.mark.parametrize("entries", [slice(None), slice(2 * SLICE, 2 * SLICE + 1)])
def test_of_two_states_that_meet_again_one_gives_way(
    ranks: int,
    part: Callable[[World, slice], None],
    yielding: set[int],
    entries: slice,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All were sound, and different, for good. They may differ in one slice: averages are the same for all."""
    with world(ranks) as w:
        part(w, entries)
        w.run(40)
        assert w.equal()
        assert all(one.sound for one in w.ranks)
        if yielding:
            alone = min(yielding)
            assert f"rank {alone}: this rank differs from the others" in caplog.text
        assert "ranks that were apart may have followed two states" in caplog.text


def synchronize(w: World, timeout: float = PATIENCE, ranks: Sequence[int] = ()) -> list[bool]:
    """All ranks at once, each with a thread of its own."""
    chosen = [w[rank] for rank in ranks] if ranks else w.ranks
    with ThreadPoolExecutor(len(chosen)) as threads:
        return list(threads.map(lambda one: one.synchronize(timeout), chosen))


@pytest.mark.parametrize(
    ("damaged", "changed", "taken"),
    [
        ({0, 2}, set(), [4, 0, 4]),  # by a sound rank's
        ({0, 1, 2}, set(), [4, 4, 0]),  # there is none: after step 2 it is rank 2's turn (clock-33)
        (set(), {2}, [0, 0, 4]),  # nothing was missed, and still they differ: most hold something else
    ],
)
def test_synchronizing_makes_all_equal(
    damaged: set[int], changed: set[int], taken: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with world(3, 3) as w:
        for rank in damaged:
            w.damage(rank, 0.3 * (rank + 1))
        for rank in changed:
            w.models[rank].weight.data += 0.5
        for _ in range(2):  # once more after the same step
            assert synchronize(w) == [True] * 3
            assert w.equal()
            assert all(one.sound for one in w.ranks)
            assert w.counts("slices_taken") == taken
        assert ("of rank(s) [2] are not those of rank" in caplog.text) == bool(changed)


def test_a_rank_that_hears_nobody_is_not_synchronized() -> None:
    """However sound it is: nobody knows what the others hold."""
    with world(3, 2) as w:
        assert synchronize(w, 0.4, [1]) == [False]
        w.damage(0, 0.5)
        assert synchronize(w, 2.0, [0, 1]) == [False] * 2  # rank 2 does not come
        assert bool((w.models[0].weight == w.models[1].weight).all())  # and these two are equal all the same


def test_a_rank_that_is_stopped_is_waited_for() -> None:
    """The others had an answer as soon as they suspected it, and saved what it does not hold."""
    with world(3, 2) as w:
        tries: list[int] = []

        def stopped(rank: int, *_: Any) -> None:
            if rank == 2 and len(tries) < 2:
                tries.append(rank)
                raise TransportError("no answer in time")

        w.watch(0, stopped)
        w.live = {0, 1}
        assert synchronize(w) == [True] * 3
        assert tries == [2, 2]


@pytest.mark.parametrize(
    ("ranks", "gone", "how", "well"),
    [
        (3, {2}, "died", True),
        (4, {2, 3}, "died", False),
        (4, {2, 3}, "known to have died", True),
        (2, {1}, "known to have died", True),
        (3, {1, 2}, "closed", False),  # it was true at once
    ],
)
def test_who_is_gone_is_not_waited_for_and_those_who_have_not_closed_have_to_be_a_majority(
    ranks: int, gone: set[int], how: str, well: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of those that have a vote: the engine may know that processes have ended. Rule: clock-38."""
    members = Membership(ranks, 0)
    for rank in gone if how.startswith("known") else ():
        members.died(rank, 0)
    with caplog.at_level("INFO"), world(ranks, 2, quorum=members.quorum) as w:
        for rank in gone:
            w.paths[rank].close()
        w.live -= gone
        w.closed |= gone if how == "closed" else set()
        w.damage(0, 0.5)
        left, begun = sorted(w.live), time.monotonic()
        assert synchronize(w, 2 * PATIENCE, left) == [well] * len(left)
        assert time.monotonic() - begun < PATIENCE
        assert w[0].sound == (len(left) > 1), "else it has been compared with nobody"
        assert f"rank(s) {sorted(gone)} have {how.split()[-1]}" in caplog.text
        assert (f"that is no majority of {ranks} ranks" in caplog.text) == (not well)


def test_ranks_that_have_not_met_the_same_ranks_give_the_same_answer(caplog: pytest.LogCaptureFixture) -> None:
    with world(3, 2) as w:
        w.cut(0, 2)
        w.views = {0: {0, 1}}
        w.closed.add(2)
        assert synchronize(w) == [False] * 3
        assert "others have not met all of them" in caplog.text
        w.live, w.views = set(), {}  # nobody waits for anybody at the end


def test_a_slice_is_compared_by_sound_ranks_that_stand_after_the_same_step() -> None:
    """A rank that lost a result in that step must not take the loss for a fault of memory (clock-33)."""
    with world(2, 2) as w:
        list(w.each(lambda rank: w[rank]._compare_slice(1, 1, [1 - rank])))
        assert w.counts("digests_compared") == [1, 1]
        w.run(1)
        w.damage(1, 0.5)
        w[1].moment.settle(2)
        with pytest.raises(TransportError, match="not sound"):
            w[1]._compare_slice(2, 2, [0])
        w[0]._compare_slice(2, 2, [1])
        assert w[0].sound
        with pytest.raises(TransportError, match="past"):
            w[0]._compare_slice(1, 2, [1])
        assert w.counts("digests_compared") == [1, 1]
        assert w.counts("digests_unlike") == [0, 0]


@pytest.mark.parametrize("compare", [True, False])
def test_a_difference_that_no_lost_result_explains_is_named_once_a_window(
    compare: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with world(4, 4, period=4, share=0.0, compare=compare) as w:
        w.models[2].weight.data += 0.5
        w.run(4)
        assert [one.sound for one in w.ranks] == [True, True, not compare, True]
        assert caplog.text.count("rank 2: this rank differs from the others after step 4 in slice 0 of 4") == compare
        assert caplog.text.count("rank 1: rank(s) [2] differ") <= 1


def test_slices_are_compared_until_a_peer_has_answered() -> None:
    """Two halves that had each led were never compared: one was further for as many steps as there are slices."""
    with world(4, 2) as w:
        w.views = {0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {2, 3}}
        for rank in range(4):
            w.damage(rank, 0.5 if rank < 2 else 1.0)
        w.run(12)
        assert w.counts("led") == [1, 0, 1, 0]
        assert all(one.sound for one in w.ranks)
        w.views, begun = {}, w.step + 1
        for half in ((0, 1), (2, 3)):  # the second applies what the first has averaged
            for step in range(begun, begun + w[0].replica.slices + 3):
                w.step = step
                list(w.each(w._one, half))
            list(w.each(w.heard, half))
        w.run(4 * REPAIRED + 4)
        assert w.equal()


@pytest.mark.parametrize(("best", "scale", "rate"), [(1.0, 8.0, 0.1), (0.0, 2.0, 0.1), (1.0, 2.0, 0.2)])
def test_synchronizing_compares_extra_state_loss_scales_and_plain_values(
    best: float, scale: float, rate: float
) -> None:
    """It was true while an average of weights, or a scale, was another one. Equal values may be of other objects."""
    with world(3) as w:
        optimizers = optimizers_of(w)
        w.run(2)
        optimizers[2].param_groups[0]["lr"] = rate
        kept = [{"best": torch.ones(2), 3: (1, ["a"])}, OrderedDict({3: (1, ["a"]), "best": torch.ones(4)[::2]})]
        extra_state = [Kept(one) for one in (*kept, kept[0] | {"best": torch.full((2,), best)})]
        scalers = [Kept(2.0), Kept(2.0), Kept(scale)]
        for one, state, each, scaler in zip(w.ranks, w.states, extra_state, scalers, strict=True):
            one._extra_state, state.scaler = {"average": each}, scaler
        assert synchronize(w) == [True] * 3
        assert [scaler.kept for scaler in scalers] == [2.0] * 3
        assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.1] * 3
        assert [each.kept["best"].tolist() for each in extra_state] == [[1.0] * 2] * 3
        assert w.counts("whole_taken") == [0, 0, 1]
        assert w.counts("slices_taken") == [0, 0, 0]


def test_who_meets_again_after_the_same_step_gets_no_standing_of_the_first_meeting() -> None:
    """Nor does one that is still in the first one get standings of the second."""
    served: list[Callable[[bytes], Sequence[bytes]]] = []
    path: Any = SimpleNamespace(serve=lambda _, handler: served.append(handler), before_close=lambda _: None)
    moment: Any = SimpleNamespace(step=2)
    communicator: Any = SimpleNamespace(reliable=path, config=SimpleNamespace(rank=0), part=None)
    meetings = Standings(communicator, moment, lambda: Standing(True), lambda *_: Standing(True))

    def ask(number: int, asker: int, which: int) -> tuple[int, int]:
        request = _ASK.pack(asker, _ROUND, 2, number, 0, which, b"")
        return _HEAD.unpack_from(served[0](request)[0])[:2]

    meetings.publish(2, 0, Standing(True))
    assert [ask(0, 1, 0), ask(0, 2, 0)] == [(_HERE, 1)] * 2
    meetings.publish(2, 1, Standing(True))
    assert ask(1, 1, 1) == (_HERE, 1)
    assert ask(0, 1, 0) == (_NOT_YET, 0)  # it has heard all
    meetings.leave()
    meetings.publish(2, 0, Standing(True))
    assert [ask(0, 1, 0), ask(1, 2, 1), ask(1, 1, 2)] == [(_HERE, 2), (_HERE, 1), (_NOT_YET, 0)]


def test_who_closes_waits_until_those_who_synchronize_with_it_are_through() -> None:
    with world(3, 3) as w:
        w.damage(1, 0.5)
        through, gather = threading.Barrier(3), w[2].standings.gather

        def slow(*arguments: Any) -> Any:  # the others are through and about to close before rank 2 asks anybody
            if arguments[1] == 2:  # it has published its verdict: in the second round all were equal
                through.wait(PATIENCE)
            return gather(*arguments)

        w[2].standings.gather = slow

        def leave(rank: int) -> bool:
            well: bool = w[rank].synchronize(PATIENCE)
            if rank != 2:
                through.wait(PATIENCE)
            w.paths[rank].close()
            return well

        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(leave, range(3))) == [True] * 3
        assert w.equal()


def test_a_rank_that_went_on_without_synchronizing_is_not_waited_for_and_gives_no_state_of_another_step() -> None:
    with world(2, 2) as w:
        w.damage(1, 0.5)
        w[1].moment.settle(1)
        w.run(1, only={0})
        begun = time.monotonic()
        assert not w[1].synchronize(2 * PATIENCE)
        assert time.monotonic() - begun < PATIENCE
        assert not w[1].adopt_any(3, 0.3)
        assert w[1]._try(0, 1, PATIENCE) is None
        assert w[1].counters["takes_failed"] == 2
        assert not w.equal()
        assert w[1].adopt_any(1, PATIENCE) == 2  # the present one is later and will do
        assert w.equal()


def test_ranks_that_are_lost_together_begin_with_different_donors() -> None:
    with world(6) as w:
        for rank in (3, 4, 5):
            w[rank].unsound()
        for rank, wanted, others in (3, [1, 2, 0], [4, 5]), (4, [2, 0, 1], [3, 5]), (5, [0, 1, 2], [3, 4]):
            asked: list[int] = []

            def refuse(donor: int, *_: object, asked: list[int] = asked) -> int:
                asked.append(donor)
                raise Unreachable("it does not give it")

            w[rank].take_state = refuse
            assert w[rank].adopt_any(1, PATIENCE) is None
            assert (asked[:3], sorted(asked[3:])) == (wanted, others)


def whole(w: World, step: int, wait: int = 0) -> bytes:
    """The question of a lost rank."""
    slices = w[0].replica.slices
    return resync._ASK.pack(step, resync.Wanted.LATER | resync.Wanted.WHOLE, wait, 0, w[0].replica.layouts()) + bytes(
        16 * slices
    )


@pytest.mark.parametrize("donors", [{0}, {0, 2}])
def test_a_rank_gives_its_whole_state_to_one_lost_rank_at_a_time(
    monkeypatch: pytest.MonkeyPatch, donors: set[int]
) -> None:
    """The first donor is still sending: the next one gives or, where there is none, the same one afterwards."""
    with world(3, 2) as w:
        w.damage(1, 0.5)
        w.live = donors | {1}
        first = w[0]._answer(whole(w, 1))  # on its way to another rank
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                first.over()

        monkeypatch.setattr(resync, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
        assert w[1].adopt_any(1, PATIENCE) == 1
        assert len(pauses) == (3 if donors == {0} else 0)
        assert w.counts("states_given") == ([2, 0, 0] if donors == {0} else [1, 0, 1])
        assert w[1].counters["takes_failed"] == 0
        assert w.equal()
        if donors == {0}:
            await_that(lambda: not w[0].giving, "its state has been sent")
            w[0]._answer(whole(w, 1))  # on its way again: those who meet have a few rounds only, and do not wait
            w.live = {0, 1, 2}
            w.damage(1, 0.5)
            assert synchronize(w) == [True] * 3


@pytest.mark.parametrize(
    ("held", "lost", "limits"),
    [
        (18 * 10**9, True, (30.0 + 18, 16 * 18 * 10**9, 10e6)),  # of 1.5 B parameters: it was refused, and had 30 s
        (6 * 10**9, True, (30.0 + 6, 16 * 6 * 10**9, 10e6)),  # AdamW has not stepped here
        (0, True, (30.0, 1 << 34, 10e6)),
        (18 * 10**9, False, (30.0, 16 * 18 * 10**9, 0.0)),  # ``synchronize`` ends when its caller says
    ],
)
def test_a_state_has_room_and_a_lost_rank_gives_it_time_by_what_is_held_here(
    held: int, lost: bool, limits: tuple[float, int, float]
) -> None:
    with world(2, 2) as w:
        w.damage(1, 0.5)
        asked = list[Any]()
        w.watch(1, lambda _, name, __, *given: asked.append(given) if name == "state" else None)
        w[1]._size = lambda: held
        if lost:
            assert w[1].adopt_any(1, 30.0) == 1
        else:
            assert synchronize(w, 30.0) == [True] * 2
        assert asked == [(pytest.approx(limits[0], abs=5.0), *limits[1:])]
        assert w.equal()


def test_requests_that_make_no_sense_are_refused() -> None:
    with world(2, 1, entries=1000) as w:
        for size in (0, resync._ASK.size, resync._ASK.size + 3 * 16):
            with pytest.raises(Refusal, match=f"a request of {size} bytes for a state of 2 slices"):
                w.paths[1].pull(0, "state", bytes(size), PATIENCE)
        w[0].moment.disturb()
        with pytest.raises(Refusal, match="has not ended"):
            w[0]._answer(whole(w, 0))
        w[0].moment.settle(0)
        given = w[0]._answer(whole(w, 0))  # it may do so later
        for answer in (b"", bytes(11), given[0]):  # the last one tells of slices
            w[1]._reliable = SimpleNamespace(pull=lambda *_, answer=answer: answer)
            with pytest.raises(TransportError, match="bytes as its state: run one version"):
                w[1].take_state(0, 0, PATIENCE)
            assert w[1].sound
        w[1]._reliable = w.paths[1]
        w[0].moment.disturb()
        with pytest.raises(Refusal, match="step 0 is past"):
            w[1].take_state(0, 0, PATIENCE)

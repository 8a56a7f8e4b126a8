"""A rank that was away leaves out whole iterations of the loop, however many passes each of them has (clock-20).

Two ranks of one process: the first trains alone, and its averages are its own gradients; the second one trains with
the first one's averages, and is away for some iterations. Nothing of a transport but its labels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

import solo
from solo import Rank, Told, adam, backward, data, plain, sam, without_job
from tailbound.errors import ConfigError

pytest.importorskip("torch", reason="missing capability 'torch': pip install 'tailbound[torch]'")
import torch
import torch.distributed as dist

from tailbound.torch import batches
from tailbound.torch.finished import Layout
from tailbound.torch.scaler import GradScaler
from tailbound.torch.steps import Steps
from tailbound.transport.reliable import Refusal

Make = Callable[..., Rank]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made: list[Rank] = []

    def make(told: Told | None = None, *, keeps: bool = True, **options: Any) -> Rank:
        made.append(Rank({} if told is None else told, keeps=keeps, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    dist.destroy_process_group()


@pytest.fixture
def one(rank: Make) -> Rank:
    return rank()


@pytest.fixture
def pair(rank: Make) -> tuple[Rank, Rank]:
    """The second one is told what the first one has averaged."""
    told: Told = {}
    return rank(told), rank(told, keeps=False)


@pytest.mark.parametrize(
    ("loop", "passes", "left_out", "sound"),
    [
        ("plain", 1, {8: 3, 15: 2}, True),
        ("sam", 2, {8: 3, 15: 2}, False),  # averages that are dropped may have counted: it is to be made equal
        ("accumulating", 3, {8: 3, 15: 2}, False),
        ("alternating", 2, {8: 3, 15: 2}, True),
        ("by_closure_once", 1, {8: 3, 15: 2}, True),  # without a closure its step() raised a TypeError
        ("differing", 2, {}, True),
    ],
)
def test_whole_iterations_are_applied(
    pair: tuple[Rank, Rank], loop: str, passes: int, left_out: dict[int, int], sound: bool, caplog: Any
) -> None:
    """Each pass was one step of the optimizer and one batch: the rank never met the others' passes again.

    Away for three iterations and a pass of the fourth, which is not whole; later for two. A loop whose iterations
    differ stays behind in the right pass.

    States: in step to behind, behind to in step.
    """
    first, second = pair
    first.train(getattr(solo, loop)(first), 20, passes)
    computed = second.train(getattr(solo, loop)(second), 20, passes, {8: 3 * passes + passes - 1, 15: 2 * passes})
    assert computed == [i for i in range(20) if not any(at <= i < at + n for at, n in left_out.items())]
    assert second.weights() == first.weights()
    assert ("iterations differ in their passes" in caplog.text) == (not left_out)
    if left_out:
        assert second.job.step == first.job.step == 20 * passes
        assert second.state.resync.sound == sound


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(
    ("loop", "passes", "void", "why"),
    [
        ("plain", 1, 4, "minority"),
        ("plain", 1, 4, "skipped"),  # by a safeguard
        ("plain", 1, 4, "void"),  # no rank's gradient was finite
        ("sam", 2, 8, "minority"),
        ("sam", 2, 9, "minority"),
        ("accumulating", 3, 13, "minority"),
        ("by_closure_once", 1, 4, "minority"),
    ],
)
def test_an_optimizer_makes_nothing_of_an_iteration_with_a_void_pass(
    one: Rank, loop: str, passes: int, void: int, why: str, bounded: bool
) -> None:
    """Zeros would move weights by what momentum and weight decay keep; the next iteration counts. Rule: clock-38.

    Also where the loop says itself when a step is over, as one does whose ranks may come back.
    """
    iterate, held = getattr(solo, loop)(one), list[Any]()
    one.job.void = {void: why}
    for i in range(7):
        if bounded:
            one.state.boundary()
        iterate(i)
        kept = [str(opt.state_dict()) for opt in one.state.optimizers if "closure" not in loop]  # LBFGS counts calls
        held.append((one.weights(), kept))
    assert [a == b for a, b in itertools.pairwise(held)] == [i + 1 == void // passes for i in range(6)]
    assert all(p.grad is not None for p in one.net.parameters()), "the program has them as without"


@pytest.mark.parametrize("updates", [False, True])
def test_no_rank_reads_a_state_whose_step_a_scaler_has_left_out(one: Rank, updates: bool) -> None:
    """Its scale and schedules were those after the step, beside the parameters of the step before. Rule: clock-21."""
    scaler, optimizer = GradScaler(one.state, init_scale=8.0), adam(one)
    one.job.void = {2: "void"}
    for i in range(3):
        with one.state.resync.moment.reading(i - 1, 0.0) if i else nullcontext():
            optimizer.zero_grad()
        scaler.scale(one.loss(data(i))).backward()
        one.state.overflowed = i == 2
        scaler.step(optimizer)
        if updates or i < 2:
            scaler.update()
        one.state.boundary()
    with pytest.raises(Refusal, match="is past here"), one.state.resync.moment.reading(1, 0.0):
        pass


def test_an_optimizer_of_the_program_keeps_its_arguments_and_its_gradients(one: Rank) -> None:
    """One whose ``step`` takes a loss, and calls that of its class, whose hooks run within its own. Rule: clock-38.

    An iteration whose step was left out, as for a loss that is not finite, voids no other.
    """

    class Polyak(torch.optim.SGD):
        @torch.no_grad()
        def step(self, loss: torch.Tensor, factor: float) -> None:
            assert (factor, loss.ndim) == (0.5, 0)
            super().step()

    steps = []
    optimizer = Polyak(one.net.parameters(), 0.1)
    one.job.void = {1: "minority", 3: "minority"}
    for i in range(5):
        before, loss = one.weights(), backward(one, optimizer, i)
        if i != 3:
            optimizer.step(loss, 0.5)
        steps.append(one.weights() != before)
        assert all(p.grad is not None for p in one.net.parameters())
    assert steps == [True, False, True, False, True]


def test_the_others_wait_until_the_first_step_is_launched(one: Rank) -> None:
    """A first pass may compile for a minute; an evaluation before it changes nothing. Rule: clock-16."""
    with one.state.hold():
        pass
    assert one.job.held
    assert all(one.job.held)
    plain(one)(0)
    assert one.job.held[-1] is False


def test_what_ends_an_iteration_is_called_once_for_each(pair: tuple[Rank, Rank]) -> None:
    """It was called after every pass that an optimizer follows, so that a scheduler moved twice."""
    first, second = pair
    optimizers, ended = [adam(second), adam(second)], list[int]()

    def step() -> None:
        ended.append(second.job.step)
        optimizers[1].step()

    def loop(i: int) -> None:
        for optimizer in optimizers:
            backward(second, optimizer, i)
            optimizer.step()

    first.train(solo.alternating(first), 14, 2)
    assert second.train(loop, 14, 2, {9: 6}, step=step) == [*range(9), 12, 13]
    assert (len(ended), second.weights()) == (3, first.weights())


def test_a_loop_of_its_own_applies_whole_iterations_too(pair: tuple[Rank, Rank]) -> None:
    """What ends with a step of the optimizer is one, where ``catch_up`` is called now and then."""
    first, second = pair
    first.train(sam(first), 12, 2)
    iterate, i = sam(second), 0
    while i < 12:
        if i == 7:
            second.job.newest = second.job.step + 7
            i += second.state.catch_up()[0]
            assert i == 10
        iterate(i)
        i += 1
    assert (second.job.step, second.weights()) == (24, first.weights())


def test_nobody_reads_weights_that_the_loop_moves_between_two_passes(one: Rank) -> None:
    """SAM's, which no optimizer tells of: a rank took them for the state before, and was equal to none."""
    seen = list[bool]()
    iterate = sam(one)
    one.net.register_forward_pre_hook(lambda *_: seen.append(one.state.resync.moment._readable))
    for i in range(12):
        iterate(i)
    assert seen[-4:] == [True, False, True, False]


@pytest.mark.parametrize(("static", "built"), [(False, 3), (True, 4)])
def test_no_step_is_applied_before_ddp_has_built_its_buckets(rank: Make, static: bool, built: int) -> None:
    """One bucket before and after: averages went to the wrong parameters, or other ranks refused the bucket."""
    told: Told = {}
    first, second = rank(told, static_graph=static), rank(told, keeps=False, static_graph=static)
    first.train(plain(first), 8, 1)
    assert second.train(plain(second), 8, 1, {1: 5}) == [*range(built), 6, 7]
    assert second.weights() == first.weights()


def test_a_pending_step_is_not_overtaken(one: Rank) -> None:
    iterate = plain(one)
    for i in range(4):
        iterate(i)
    one.loss(data(5)).backward()
    assert one.state.catch_up() == (0, 0)  # there is nothing to do
    one.job.newest = one.job.step + 1
    for one.job.lost in (False, True):
        with pytest.raises(ConfigError, match=r"catch_up\(\) between backward\(\) and optimizer.step\(\), 1 steps"):
            one.state.catch_up()


@pytest.mark.parametrize("void", [False, True])
def test_a_batch_that_is_asked_for_before_the_step_is_refused(one: Rank, void: bool) -> None:
    """By what reads ahead, around ``batches``. A step that the program leaves out is none of that, nor a GAN's pass."""
    optimizer = adam(one)
    one.state.absence.void, one.state.absence.follow = void, lambda **_: None
    for i in batches(range(12), one.state):
        backward(one, optimizer, i)
        if i % 4:
            optimizer.step()
    one.state.absence.void, one.state.steps.ended = False, None
    source = iter(batches(range(9), one.state))
    next(source)
    for i in range(2):
        one.loss(data(i)).backward()
        if i == 0:
            next(source)
        optimizer.step()
    with pytest.raises(ConfigError, match=r"between backward\(\) and optimizer.step\(\).*batches\(prefetch"):
        next(source)


@pytest.mark.parametrize("synchronized", [True, False])
@pytest.mark.parametrize("per_step", [1, 2, 4])
def test_batches_that_make_one_step_are_to_be_given(one: Rank, synchronized: bool, per_step: int) -> None:
    optimizer, made = adam(one), list[int]()

    def loop() -> None:
        for i in batches(range(32), one.state, per_step=per_step):
            last = i % 4 == 3
            with nullcontext() if synchronized or last else one.net.no_sync():
                one.loss(data(i)).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            made.append(i)

    if per_step == 4:
        loop()
        assert made == list(range(32))
    else:
        with pytest.raises(ConfigError, match=rf"4 batches make one step here, and per_step is {per_step}: .*=4\)"):
            loop()
    with pytest.raises(ConfigError, match="per_step=0: give"):
        next(batches([1], one.state, per_step=0))


@pytest.mark.parametrize("void", [False, True])
def test_no_batch_is_left_out_where_another_model_steps_in_the_loop_unless_it_follows(rank: Make, void: bool) -> None:
    """It was never caught up, and stayed behind; the other one jumped alone where its steps are void."""
    both = [rank(), rank()]
    one, iterates = both[0], [plain(each) for each in both]
    iterates[1](0)
    for i in batches(range(4), one.state):  # a phase of its own
        iterates[0](i)
    assert one.state.absence.skips
    both[1].state.absence.void, both[1].state.absence.follow = void, lambda **_: None
    made = []
    for i in batches(range(4), one.state):
        for iterate in iterates:
            iterate(i)
        made.append(i)
        one.job.newest = one.job.step + 2
    assert made == list(range(4))
    assert not one.state.absence.skips  # so that its iterations are void once it is lost
    one.job.newest, both[1].state.absence.void, both[1].state.steps.ended = 0, False, None
    sources = [iter(batches(range(5), each.state)) for each in both]
    for _ in range(5):
        for iterate, source in zip(iterates, sources, strict=True):
            iterate(next(source))


def test_what_an_optimizer_steps_beside_the_model_is_left_alone_and_told_once(
    pair: tuple[Rank, Rank], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pair
    beside = torch.nn.Parameter(torch.ones(1))

    def loop(one: Rank, *more: Any) -> Callable[[int], None]:
        optimizer = torch.optim.SGD([*one.net.parameters(), *more], 0.01)

        def iterate(i: int) -> None:
            optimizer.zero_grad()
            (one.loss(data(i)) + sum(p.sum() for p in more)).backward()
            optimizer.step()

        return iterate

    first.train(loop(first), 10, 1)
    assert len(second.train(loop(second, beside), 10, 1, {6: 2})) == 8
    assert second.weights() == first.weights()
    assert beside.item() == pytest.approx(1 - 0.01 * 8)
    assert beside.grad is not None
    assert caplog.text.count("SGD steps 1 parameter(s) that are not of this model, too") == 1


def test_a_model_that_no_optimizer_is_known_of_is_told_once(one: Rank, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(20):
        assert ("no torch.optim.Optimizer has stepped" in caplog.text) == (i > 16)
        one.loss(data(i)).backward()
    assert caplog.text.count("no torch.optim.Optimizer has stepped this model in its first 16 backward passes") == 1


def test_no_rank_skips_a_step_within_join(one: Rank) -> None:
    source = iter(batches(range(4), one.state))
    next(source)
    one.state._before_forward(SimpleNamespace(_join_config=SimpleNamespace(enable=True)))
    with pytest.raises(ConfigError, match=r"DDP's join\(\)"):
        next(source)
    one.state._before_forward(one.net)
    assert one.state.catch_up() == (0, 0)


def test_one_state_is_not_taken_for_two_models(rank: Make) -> None:
    """What is kept of a bucket is kept by its number; two hooks may be made by hand of one state."""
    one, other = rank(), rank()
    with pytest.raises(ConfigError, match="has a model already"):
        one.state.attach(other.net)
    iterate = plain(other)
    one.state.layout = other.state.layout = Layout()  # of a state that was never attached
    plain(one)(0)
    with pytest.raises(ConfigError, match=r"4 parameter.* make one TailboundState for each model"):
        iterate(0)


def test_a_sparse_bucket_that_is_the_last_or_the_first_one_is_noted(rank: Make) -> None:
    """The hook left early there: a rank out of data counted as sound, and updates in a closure were read."""

    def words() -> Rank:
        embedding = torch.nn.EmbeddingBag(5, 3, sparse=True, mode="sum")
        return rank(module=torch.nn.Sequential(embedding, torch.nn.Linear(3, 2)))

    one, inputs = words(), torch.zeros(2, 2, dtype=torch.long)
    one.loss(inputs).backward()  # the last bucket of the first step, the first of all others
    assert one.state.resync.sound
    one.net._match_all_reduce_for_bwd_pass()  # what ``join()`` does
    assert not one.state.resync.sound
    one = words()
    optimizer, seen = torch.optim.SGD(one.net.parameters(), 0.1), list[bool]()

    def passes() -> float:
        loss = one.loss(inputs)
        seen.append(one.state.resync.moment._readable)
        loss.backward()
        seen.append(one.state.resync.moment._readable)
        return float(loss.detach())

    for _ in range(3):
        optimizer.step(passes)
    assert seen == [False, False, True, False, True, False]


@pytest.mark.parametrize("moved", [4, 5])
def test_a_rank_that_jumps_without_a_state_goes_on_in_its_own_pass(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    """It would meet the others' second pass by its first one for ever."""
    first, second = pair
    first.train(sam(first), 20, 2)
    iterate = sam(second)
    second.train(iterate, 6, 2)

    def jump() -> int:
        second.job.step += moved
        second.job.lost = False
        return moved

    monkeypatch.setattr(second.job, "jump", jump, raising=False)
    monkeypatch.setattr(second.job, "drain", lambda timeout: True, raising=False)
    monkeypatch.setattr(second.state.absence, "take_state", lambda *_: 0)
    second.job.lost = True
    assert second.state.catch_up() == (0, (moved + 1) // 2)
    assert second.job.step == 12 + moved + moved % 2


# -- batches of steps that this rank does not compute, over the ends of epochs, too --------------------------------


@pytest.mark.parametrize(
    ("told", "epochs", "per_step", "seen", "calls", "ends"),
    [
        ({}, [5], 1, [[0, 1, 2, 3, 4]], [], ""),
        ({2: (3, 0), 4: (0, 2)}, [12], 1, [[0, 1, 5, 6, 9, 10, 11]], [2], ""),  # as many batches as steps
        ({1: (1, 2)}, [6], 1, [[0, 4, 5]], [2], ""),  # a jump, and then finished steps
        ({3: (0, 4)}, [5, 5], 1, [[0, 1, 2], [2, 3, 4]], [4], ""),  # what is left goes into the next epoch
        ({2: (2, 0)}, [10], 2, [[0, 1, 6, 7, 8, 9]], [], ""),
        # too few are left for the last step: it is made, or left out as the first time, or is of the next epoch, too
        ({2: (2, 0)}, [5, 4], 2, [[0, 1], [0, 1, 2, 3]], [], ""),
        ({7: (2, 0)}, [5, 5, 5], 2, [[0, 1, 2, 3, 4], [0, 1], [2, 3, 4]], [], "-"),
        ({12: (2, 0)}, [5, 5, 5, 5], 2, [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1], [1, 2, 3, 4]], [], "-+"),
        ({2: (1, 0)}, [2, 2, 2, 2], 4, [[0, 1], [], [], [0, 1]], [], "-+"),  # it was skipping for ever
    ],
)
def test_batches_of_steps_that_are_not_computed_are_left_out(
    told: dict[int, tuple[int, int]], epochs: list[int], per_step: int, seen: list[list[int]], calls: list[int],
    ends: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """``told``: by computed batches, how many others were applied and skipped; ``ends``: which short ends are steps."""
    made: list[list[int]] = []
    skips: list[int] = []
    state, last = without_job(), iter(ends)
    monkeypatch.setattr(Steps, "updates", property(lambda _: next(last, "+") == "+"))
    state.catch_up = lambda _: told.pop(sum(map(len, made)), (0, 0))
    for epoch in epochs:
        made.append([])
        for batch in batches(range(epoch), state, on_skip=skips.append, per_step=per_step):
            made[-1].append(batch)
    assert (made, skips) == (seen, calls)


@pytest.mark.parametrize(
    ("steps", "scaled", "made"),
    [(True, False, True), (False, False, False), (False, True, True)],  # as all gradients have overflowed
)
def test_an_end_of_too_few_batches_is_a_step_if_its_averages_are_applied_or_left_out(
    one: Rank, steps: bool, scaled: bool, made: bool
) -> None:
    optimizer = adam(one)
    for i in batches(range(3), one.state, per_step=2):
        one.loss(data(i)).backward()
        if i == 1 or steps:
            optimizer.step()
        elif scaled:
            one.state.steps.over()
    assert one.state.steps.short_ends == {made}


def test_two_loops_at_a_time_are_refused_and_two_in_turn_are_not() -> None:
    state = without_job()
    assert next(batches(range(5), state)) == 0
    assert list(batches(range(3), state)) == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"batches\(zip\(a, b\), state\)"):
        list(zip(batches(range(9), state), batches(range(9), state), strict=True))

"""A rank that was away leaves out whole iterations of the loop, however many passes each of them has (clock-20).

Two ranks of one process: the first trains alone, and its averages are its own gradients; the second one trains with
the first one's averages, and is away for some iterations. Nothing of a transport but its labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tailbound.errors import ConfigError

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.needs("torch")


class Job:
    """Stands in for the communicator: hands out the averages in ``told``, or keeps what it is given there."""

    elastic = False

    def __init__(self, told: dict[tuple[int, int], Any], *, keeps: bool) -> None:
        from tailbound.transport.reliable import Reliable

        self.told, self.keeps = told, keeps
        self.step, self.newest, self.lost = 0, 0, False
        self.held = list[bool]()  # whether the others are told to wait
        self.reliable = Reliable("127.0.0.1")
        self.job = SimpleNamespace(
            peers=[1], membership=SimpleNamespace(alive=lambda step: [1]), steps=SimpleNamespace(own=0),
            sequence=SimpleNamespace(map_at=lambda step: SimpleNamespace(owners=[1])), counters=Counter(),
        )  # fmt: skip

    @property
    def behind(self) -> int:
        return max(0, self.newest - self.step)

    def rings(self, tensors: tuple[int, ...]) -> tuple[int, int, int]:
        return 1, 2, 0

    def hold(self, on: bool) -> None:
        self.held.append(on)

    def launch(self, bucket: int, data: Any, out: Any, *, last: bool, done: Callable[..., None], **_: Any) -> None:
        from tailbound.collective.op import Outcome
        from tailbound.wire.schema import op_label

        if self.keeps:
            self.told[self.step, bucket] = data.copy()
        else:
            out[:] = self.told[self.step, bucket]
        label = op_label(self.step, bucket)
        self.step += last
        done(Outcome(label=label, expected=1))


class Rank:
    """A rank that trains ``net``, a model of its own."""

    def __init__(
        self, told: dict[tuple[int, int], Any], *, keeps: bool, module: torch.nn.Module | None = None, **options: Any
    ) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from tailbound.torch.complaints import Complaints
        from tailbound.torch.contribution import Contributions
        from tailbound.torch.hook import allreduce_hook
        from tailbound.torch.paths import Paths
        from tailbound.torch.recovery import Recovery
        from tailbound.torch.state import TailboundState

        torch.manual_seed(0)
        usual = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
        self.net = DistributedDataParallel(module or usual, **options)
        self.state: Any = TailboundState.__new__(TailboundState)  # without a job, which opens sockets
        Recovery.__init__(self.state, 0, 2, (0, 0.0))
        self.state.everyone = None  # for sparse buckets: the default group
        self.job = self.state.communicator = Job(told, keeps=keeps)
        self.state._bits, self.state.paths, self.state.contributions = 8, Paths(), Contributions(False)
        complaints = Complaints(0)
        self.state._complaints, self.state.say, self.state.complain = complaints, complaints.say, complaints.complain
        self.state.attach(self.net)
        self.net.register_comm_hook(self.state, allreduce_hook)

    def loss(self, data: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(data).square().sum()
        return found

    def weights(self) -> list[float]:
        return [float(x) for p in self.net.parameters() for x in p.detach().flatten()]

    def close(self) -> None:
        self.state.detach()
        self.job.reliable.close()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rank]]:
    import torch.distributed as dist

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made: list[Rank] = []

    def make(told: dict[tuple[int, int], Any], *, keeps: bool, **options: Any) -> Rank:
        made.append(Rank(told, keeps=keeps, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    dist.destroy_process_group()


def data(i: int) -> torch.Tensor:
    import torch

    return torch.randn(5, 6, generator=torch.Generator().manual_seed(i))


def adam(one: Rank) -> torch.optim.Optimizer:
    import torch

    return torch.optim.Adam(one.net.parameters(), 0.05)


def plain(one: Rank) -> Callable[[int], None]:
    optimizer = adam(one)

    def iterate(i: int) -> None:
        optimizer.zero_grad()
        one.loss(data(i)).backward()
        optimizer.step()

    return iterate


def sam(one: Rank) -> Callable[[int], None]:
    """Two passes, the first at weights that are moved back before the step."""
    import torch

    optimizer = adam(one)

    def iterate(i: int) -> None:
        optimizer.zero_grad()
        one.loss(data(i)).backward()
        before = [p.detach().clone() for p in one.net.parameters()]
        with torch.no_grad():
            for p in one.net.parameters():
                p.add_(torch.sign(p.grad), alpha=0.01)
        optimizer.zero_grad()
        one.loss(data(i)).backward()
        with torch.no_grad():
            for p, was in zip(one.net.parameters(), before, strict=True):
                p.copy_(was)
        optimizer.step()

    return iterate


def accumulating(one: Rank) -> Callable[[int], None]:
    """Three passes that add up in ``.grad``, as the losses of a discriminator."""
    optimizer = adam(one)

    def iterate(i: int) -> None:
        optimizer.zero_grad()
        for part in range(3):
            one.loss(data(3 * i + part)).backward()
        optimizer.step()

    return iterate


def alternating(one: Rank) -> Callable[[int], None]:
    """Two passes with a step each, of an optimizer of its own."""
    first, second = adam(one), adam(one)

    def iterate(i: int) -> None:
        for optimizer in (first, second):
            optimizer.zero_grad()
            one.loss(data(i)).backward()
            optimizer.step()

    return iterate


def train(
    one: Rank, iterate: Callable[[int], None], steps: int, away: dict[int, int], passes: int, **options: Any
) -> list[int]:
    """What ``one`` has computed, which was away for ``away[i]`` passes in the iteration i."""
    from tailbound.torch import batches

    computed = []
    for i in batches(_told(one, steps, away, passes), one.state, **options):
        iterate(i)
        computed.append(i)
    return computed


def _told(one: Rank, steps: int, away: dict[int, int], passes: int) -> Iterator[int]:
    for i in range(steps):
        one.job.newest = max(one.job.newest, i * passes + away.get(i, 0))
        yield i


@pytest.mark.parametrize(
    ("loop", "passes"),
    [(plain, 1), (sam, 2), (accumulating, 3), (alternating, 2)],
    ids=["plain", "sam", "accumulating", "alternating"],
)
def test_whole_iterations_are_applied(
    rank: Callable[..., Rank], loop: Callable[[Rank], Callable[[int], None]], passes: int
) -> None:
    """Each pass was one step of the optimizer and one batch: the rank never met the others' passes again (B1, B6).

    States: in step to behind, behind to in step.
    """
    told: dict[tuple[int, int], Any] = {}
    first, second = rank(told, keeps=True), rank(told, keeps=False)
    train(first, loop(first), 20, {}, passes)
    # three iterations and a pass of the fourth, which is not whole; later two iterations
    computed = train(second, loop(second), 20, {8: 3 * passes + passes - 1, 15: 2 * passes}, passes)
    assert computed == [0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 14, 17, 18, 19]
    assert second.job.step == first.job.step == 20 * passes
    assert second.weights() == first.weights()
    # averages that are dropped may have counted: such a rank is to be made equal
    assert second.state.resync.sound == (loop in (plain, alternating))


def test_the_others_wait_until_the_first_step_is_launched(rank: Callable[..., Rank]) -> None:
    """A first pass may compile for a minute; an evaluation before it changes nothing. Rule: clock-16."""
    one = rank({}, keeps=True)
    with one.state.hold():
        pass
    assert one.job.held
    assert all(one.job.held)
    plain(one)(0)
    assert one.job.held[-1] is False


def test_what_ends_an_iteration_is_called_once_for_each(rank: Callable[..., Rank]) -> None:
    """It was called after every pass that an optimizer follows, so that a scheduler moved twice."""
    told: dict[tuple[int, int], Any] = {}
    first, second = rank(told, keeps=True), rank(told, keeps=False)
    optimizers: list[torch.optim.Optimizer] = []
    ended: list[int] = []

    def step() -> None:
        ended.append(second.job.step)
        optimizers[1].step()

    def loop(i: int) -> None:
        if not optimizers:
            optimizers.extend((adam(second), adam(second)))
        for optimizer in optimizers:
            optimizer.zero_grad()
            second.loss(data(i)).backward()
            optimizer.step()

    train(first, alternating(first), 14, {}, 2)
    assert train(second, loop, 14, {9: 6}, 2, step=step) == [*range(9), 12, 13]
    assert len(ended) == 3
    assert second.weights() == first.weights()


def test_iterations_that_differ_are_not_applied(rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture) -> None:
    """The rank stays behind, in the right pass. Where it is lost it cannot join, and ends if that lasts."""
    told: dict[tuple[int, int], Any] = {}
    first, second, third = (rank(told, keeps=number == 0) for number in range(3))

    def loop(one: Rank) -> Callable[[int], None]:
        one_pass, three = plain(one), accumulating(one)
        return lambda i: three(i) if i % 3 == 0 else one_pass(i)

    train(first, loop(first), 12, {}, 2)
    assert train(second, loop(second), 12, {8: 4}, 2) == list(range(12))
    assert second.weights() == first.weights()
    assert "iterations differ in their passes" in caplog.text
    train(third, loop(third), 12, {}, 2)
    third.job.lost = True
    assert [third.state.catch_up() for _ in range(23)] == [(0, 0)] * 23
    with pytest.raises(ConfigError, match=r"Give every iteration of tailbound\.torch\.batches the same"):
        third.state.catch_up()


def by_closure(one: Rank, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    """An iteration in which the optimizer makes the passes itself."""

    def closure(i: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = one.loss(data(i))
        loss.backward()
        return loss

    return lambda i: optimizer.step(lambda: closure(i))  # type: ignore[arg-type, return-value]


def test_an_optimizer_that_evaluates_several_times_in_a_step_is_not_applied(rank: Callable[..., Rank]) -> None:
    """LBFGS: its step is made of all of its passes."""
    import torch

    told: dict[tuple[int, int], Any] = {}
    first, second = rank(told, keeps=True), rank(told, keeps=False)

    def loop(one: Rank) -> Callable[[int], None]:
        return by_closure(
            one, torch.optim.LBFGS(one.net.parameters(), 0.01, max_iter=2, tolerance_grad=0, tolerance_change=0)
        )

    train(first, loop(first), 8, {}, 2)
    assert train(second, loop(second), 8, {6: 4}, 2) == list(range(8))
    assert second.weights() == first.weights()


def test_an_optimizer_that_asks_for_a_closure_and_evaluates_once_is_applied(rank: Callable[..., Rank]) -> None:
    """Its step() without one raised a TypeError."""
    import torch

    told: dict[tuple[int, int], Any] = {}
    first, second = rank(told, keeps=True), rank(told, keeps=False)

    def loop(one: Rank) -> Callable[[int], None]:
        return by_closure(one, torch.optim.LBFGS(one.net.parameters(), 0.01, max_iter=1))

    train(first, loop(first), 10, {}, 1)
    assert train(second, loop(second), 10, {6: 2}, 1) == [0, 1, 2, 3, 4, 5, 8, 9]
    assert second.weights() == first.weights()


def test_a_loop_of_its_own_applies_whole_iterations_too(rank: Callable[..., Rank]) -> None:
    """What ends with a step of the optimizer is one, where ``catch_up`` is called now and then."""
    told: dict[tuple[int, int], Any] = {}
    first, second = rank(told, keeps=True), rank(told, keeps=False)
    train(first, sam(first), 12, {}, 2)
    iterate, i = sam(second), 0
    while i < 12:
        if i == 7:
            second.job.newest = second.job.step + 7
            i += second.state.catch_up()[0]
            assert i == 10
        iterate(i)
        i += 1
    assert second.job.step == 24
    assert second.weights() == first.weights()


def test_no_step_is_applied_before_ddp_has_built_its_buckets(rank: Callable[..., Rank]) -> None:
    """One bucket before and after: averages went to the wrong parameters, or other ranks refused the bucket (B7)."""
    for options, built in (({}, 3), ({"static_graph": True}, 4)):
        told: dict[tuple[int, int], Any] = {}
        first, second = rank(told, keeps=True, **options), rank(told, keeps=False, **options)
        train(first, plain(first), 8, {}, 1)
        assert train(second, plain(second), 8, {1: 5}, 1) == [*range(built), 6, 7]
        assert second.weights() == first.weights()
        settled = rank({}, keeps=True, **options)
        iterate, seen = plain(settled), []
        for i in range(6):
            iterate(i)
            seen.append(settled.state.layout.settled)
        assert seen == [i + 1 >= built for i in range(6)]


def test_a_pending_step_is_not_overtaken(rank: Callable[..., Rank]) -> None:
    """Step k + 1 was applied before step k of the optimizer (B6c)."""
    one = rank({}, keeps=True)
    iterate = plain(one)
    for i in range(4):
        iterate(i)
    one.loss(data(5)).backward()
    assert one.state.catch_up() == (0, 0)  # there is nothing to do
    one.job.newest = one.job.step + 1
    for one.job.lost in (False, True):
        with pytest.raises(ConfigError, match=r"catch_up\(\) between backward\(\) and optimizer.step\(\), 1 steps"):
            one.state.catch_up()


def test_a_batch_that_is_asked_for_before_the_step_is_refused(rank: Callable[..., Rank]) -> None:
    """By what reads ahead, around ``batches``. A step that the program leaves out is none of that."""
    from tailbound.torch import batches

    one = rank({}, keeps=True)
    optimizer = adam(one)
    for i in batches(range(12), one.state):
        optimizer.zero_grad()
        one.loss(data(i)).backward()
        if i % 4:
            optimizer.step()
    source = iter(batches(range(9), one.state))
    next(source)
    for i in range(2):
        one.loss(data(i)).backward()
        if i == 0:
            next(source)
        optimizer.step()
    with pytest.raises(ConfigError, match=r"between backward\(\) and optimizer.step\(\).*batches\(prefetch"):
        next(source)


@pytest.mark.parametrize("synchronised", [True, False])
def test_batches_that_make_one_step_are_to_be_given(rank: Callable[..., Rank], synchronised: bool) -> None:
    """``per_step`` was forgotten: the rank skipped a quarter of what it should (A4)."""
    from contextlib import nullcontext

    from tailbound.torch import batches

    for per_step in (1, 2, 4):
        one = rank({}, keeps=True)
        optimizer, made = adam(one), list[int]()

        def loop(one: Rank = one, optimizer: Any = optimizer, made: Any = made, per_step: int = per_step) -> None:
            for i in batches(range(32), one.state, per_step=per_step):
                last = i % 4 == 3
                with nullcontext() if synchronised or last else one.net.no_sync():
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


def test_a_batch_without_a_step_now_and_then_is_no_accumulation(rank: Callable[..., Rank]) -> None:
    """Bad data, an overflow of a loss scale, and a start that reads over what was trained with before."""
    from tailbound.torch import batches

    one = rank({}, keeps=True)
    iterate, made = plain(one), 0
    for i in batches(range(40), one.state):
        if i < 5 or i % 7 in (0, 1):
            continue
        iterate(i)
        made += 1
    assert made == 25


def test_another_model_that_steps_in_the_loop_is_refused(rank: Callable[..., Rank]) -> None:
    """It was never caught up, and stayed behind for good (B6b)."""
    from tailbound.torch import batches

    one, other = rank({}, keeps=True), rank({}, keeps=True)
    iterate, beside = plain(one), plain(other)
    beside(0)
    for i in batches(range(4), one.state):  # a phase of its own
        iterate(i)
    source = iter(batches(range(4), one.state))
    next(source)
    iterate(0)
    beside(0)
    with pytest.raises(ConfigError, match="another registered model makes steps in this loop"):
        next(source)


def test_two_models_that_each_follow_batches_of_their_own(rank: Callable[..., Rank]) -> None:
    """Both catch up, so neither is in the other's way."""
    from tailbound.torch import batches

    both = [rank({}, keeps=True), rank({}, keeps=True)]
    iterates = [plain(one) for one in both]
    sources = [iter(batches(range(5), one.state)) for one in both]
    for _ in range(5):
        for iterate, source in zip(iterates, sources, strict=True):
            iterate(next(source))
    assert [one.job.step for one in both] == [5, 5]


def test_what_an_optimizer_steps_beside_the_model_is_left_alone(rank: Callable[..., Rank]) -> None:
    """It was stepped again by the gradient of the last iteration that this rank has computed (B6b)."""
    import torch

    told: dict[tuple[int, int], Any] = {}
    first, second = rank(told, keeps=True), rank(told, keeps=False)
    beside = torch.nn.Parameter(torch.ones(1))

    def loop(one: Rank, *more: Any) -> Callable[[int], None]:
        optimizer = torch.optim.SGD([*one.net.parameters(), *more], 0.01)

        def iterate(i: int) -> None:
            optimizer.zero_grad()
            (one.loss(data(i)) + sum(p.sum() for p in more)).backward()
            optimizer.step()

        return iterate

    train(first, loop(first), 10, {}, 1)
    computed = train(second, loop(second, beside), 10, {6: 2}, 1)
    assert len(computed) == 8
    assert second.weights() == first.weights()
    assert beside.item() == pytest.approx(1 - 0.01 * 8)
    assert beside.grad is not None


def test_no_rank_skips_a_step_within_join(rank: Callable[..., Rank]) -> None:
    """The others would wait for its forward pass."""
    from tailbound.torch import batches

    one = rank({}, keeps=True)
    source = iter(batches(range(4), one.state))
    next(source)
    one.state._before_forward(SimpleNamespace(_join_config=SimpleNamespace(enable=True)))
    with pytest.raises(ConfigError, match=r"DDP's join\(\)"):
        next(source)
    one.state._before_forward(one.net)
    assert one.state.catch_up() == (0, 0)


def test_one_state_is_not_taken_for_two_models(rank: Callable[..., Rank]) -> None:
    """What is kept of a bucket is kept by its number."""
    one, other = rank({}, keeps=True), rank({}, keeps=True)
    with pytest.raises(ConfigError, match="has a model already"):
        one.state.attach(other.net)
    iterate = plain(other)
    other.state.layout.compare(one.net.parameters())
    with pytest.raises(ConfigError, match="that the model of this TailboundState has not"):
        iterate(0)


def test_one_state_that_is_attached_to_none_is_not_taken_for_two_models_either() -> None:
    """Two hooks made by hand."""
    import torch

    from tailbound.torch.finished import Layout

    def bucket(net: torch.nn.Module) -> Any:
        parameters = list(net.parameters())
        return SimpleNamespace(
            index=lambda: 0, buffer=lambda: torch.zeros(8), is_last=lambda: True, parameters=lambda: parameters,
            gradients=lambda: parameters,
        )  # fmt: skip

    first, second, layout = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), Layout()
    for _ in range(2):
        layout.note(bucket(first))
    with pytest.raises(ConfigError, match=r"2 parameter.* make one TailboundState for each model"):
        layout.note(bucket(second))


def words() -> torch.nn.Module:
    """A model with a sparse embedding: its bucket is the last one of the first step, and the first of all others."""
    import torch

    return torch.nn.Sequential(torch.nn.EmbeddingBag(5, 3, sparse=True, mode="sum"), torch.nn.Linear(3, 2))


def test_a_rank_out_of_data_is_not_sound_where_its_last_bucket_is_sparse(rank: Callable[..., Rank]) -> None:
    """The hook left early there (B12)."""
    import torch

    one = rank({}, keeps=True, module=words())
    one.loss(torch.zeros(2, 2, dtype=torch.long)).backward()
    assert one.state.resync.sound
    one.net._match_all_reduce_for_bwd_pass()  # what ``join()`` does
    assert not one.state.resync.sound


def test_what_an_optimizer_steps_beside_a_model_is_told_once(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture
) -> None:
    """And that nothing is known to step it (B6b)."""
    import torch

    one, beside = rank({}, keeps=True), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*one.net.parameters(), beside], 0.01)
    for i in range(3):
        one.loss(data(i)).backward()
        optimizer.step()
    assert caplog.text.count("SGD steps 1 parameter(s) that are not of this model, too") == 1
    assert "no torch.optim.Optimizer has stepped" not in caplog.text
    by_hand = rank({}, keeps=True)
    for i in range(20):
        assert ("no torch.optim.Optimizer has stepped" in caplog.text) == (i > 16)
        by_hand.loss(data(i)).backward()
    assert caplog.text.count("no torch.optim.Optimizer has stepped this model in its first 16 backward passes") == 1


def test_nobody_reads_during_an_update_where_the_first_bucket_is_sparse(rank: Callable[..., Rank]) -> None:
    """Within ``step(closure)`` the hook said nothing of the pass that the update follows (B12)."""
    import torch

    one = rank({}, keeps=True, module=words())
    optimizer, seen = torch.optim.SGD(one.net.parameters(), 0.1), list[bool]()

    def passes() -> float:
        loss = one.loss(torch.zeros(2, 2, dtype=torch.long))
        seen.append(one.state.resync.moment._readable)
        loss.backward()
        seen.append(one.state.resync.moment._readable)
        return float(loss.detach())

    for _ in range(3):
        optimizer.step(passes)
    assert seen == [False, False, True, False, True, False]


@pytest.mark.parametrize("moved", [4, 5])
def test_a_rank_that_jumps_without_a_state_goes_on_in_its_own_pass(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    """It would meet the others' second pass by its first one for ever (B1)."""
    from tailbound.torch import catch_up

    told: dict[tuple[int, int], Any] = {}
    first, second = rank(told, keeps=True), rank(told, keeps=False)
    train(first, sam(first), 20, {}, 2)
    iterate = sam(second)
    train(second, iterate, 6, {}, 2)

    def jump() -> int:
        second.job.step += moved
        second.job.lost = False
        return moved

    monkeypatch.setattr(second.job, "jump", jump, raising=False)
    monkeypatch.setattr(second.job, "drain", lambda timeout: True, raising=False)
    monkeypatch.setattr(catch_up, "take_state", lambda *_: 0)
    second.job.lost = True
    assert second.state.catch_up() == (0, (moved + 1) // 2)
    assert second.job.step == 12 + moved + moved % 2

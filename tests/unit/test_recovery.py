"""Between two steps of one rank, with the other ranks played: what may be read of it, applied by it, skipped by it.

A rank that is lost and cannot join the others: bounded patience, and an error that says what to do (clock-20).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
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


def test_steps_whose_averages_were_gone_are_skipped_and_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a scheduler is moved on by as many. Those of the entrance are told once."""
    one = lost(resync=object(), _jumped=4)
    one.communicator.lost = False
    monkeypatch.setattr(one, "end_step", lambda still: None)
    monkeypatch.setattr("tailbound.torch.catch_up.apply_finished", lambda *_: (2, 3))
    assert one.catch_up() == (2, 7)
    assert one.catch_up() == (2, 3)


def test_a_half_made_step_is_not_given_as_that_after_it() -> None:
    """``hold`` and ``boundary`` leave it open; ``synchronise`` compares it, and leaves it open then.

    States: partial to whole.
    """
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


@pytest.fixture
def alone() -> Iterator[Any]:
    """A rank that keeps the replica of ``net``, and whose averages are its own gradients."""
    import torch

    from tailbound.torch.recovery import Recovery
    from tailbound.transport.reliable import Reliable

    path = Reliable("127.0.0.1")
    membership = SimpleNamespace(alive=lambda step: [1])
    made: Any = Recovery(0, 2, (0, 0.0))
    made.communicator = SimpleNamespace(
        reliable=path, job=SimpleNamespace(peers=[1], membership=membership, steps=SimpleNamespace(own=0)),
        rings=lambda entries: (1, 2, 0), hold=lambda on: None, lost=False, behind=0, elastic=False,
    )  # fmt: skip
    torch.manual_seed(0)
    made.net = torch.nn.Linear(4, 1)
    made.attach(made.net)
    yield made
    made.detach()
    path.close()


def readable(one: Any) -> int | None:
    """The step after which others may read this rank's state now; None: they may not."""
    from tailbound.transport.reliable import Refusal

    moment = one.resync.moment
    if moment.step is None:
        return None
    try:
        with moment.reading(moment.step, 0.0) as step:
            return int(step)
    except Refusal:
        return None


class Passes:
    """Passes of a rank's model, and after which step it may be read in each forward pass and after each backward."""

    def __init__(self, one: Any) -> None:
        self.one, self.step = one, -1
        self.forward: list[int | None] = []
        self.after: list[int | None] = []

    def both(self) -> Any:
        """A forward and a backward pass, whose averages end a step of the job."""
        import torch

        self.one.net.zero_grad()
        data = torch.arange(12.0).view(3, 4) / 12 + self.step
        loss = (self.one.net(data) - 1.0).square().mean()
        self.forward.append(readable(self.one))
        self.one.before_backward()
        loss.backward()
        self.step += 1
        self.one.stepped, self.one.ended = False, self.step
        self.after.append(readable(self.one))
        return loss.detach()


@pytest.mark.parametrize("name", ["SGD", "LBFGS"])
def test_nobody_reads_while_an_optimizer_with_a_closure_updates(alone: Any, name: str) -> None:
    """Lightning makes both passes within ``step``: the replica went on counting as that before them."""
    import torch

    settings: dict[str, dict[str, Any]] = {
        "SGD": {"lr": 0.01, "momentum": 0.9},
        "LBFGS": {"lr": 0.01, "max_iter": 2, "tolerance_grad": 0.0, "tolerance_change": 0.0},
    }
    optimizer = getattr(torch.optim, name)(alone.net.parameters(), **settings[name])
    passes, updated = Passes(alone), list[int | None]()
    optimizer.register_step_post_hook(lambda *_: updated.append(readable(alone)))
    for _ in range(3):
        optimizer.step(passes.both)
    assert passes.after == [None] * (3 if name == "SGD" else 6)
    assert updated == [None] * 3
    # a second pass of the same step has no state that is whole
    assert passes.forward == ([None, 0, 1] if name == "SGD" else [None, None, 1, None, 3, None])
    alone.boundary()
    assert readable(alone) == passes.step
    passes.both()
    with alone.hold():
        assert readable(alone) == passes.step - 1  # of a step that is half made
    optimizer.step(lambda: torch.zeros(()))
    with alone.hold():
        assert readable(alone) == passes.step


def test_without_a_closure_all_of_both_passes_may_be_read(alone: Any) -> None:
    import torch

    optimizer = torch.optim.SGD(alone.net.parameters(), 0.01)
    passes, updated = Passes(alone), list[int | None]()
    optimizer.register_step_post_hook(lambda *_: updated.append(readable(alone)))
    for _ in range(3):
        passes.both()
        optimizer.step()
    assert passes.forward == [None, 0, 1]
    assert passes.after == [None, 0, 1]
    assert updated == [None] * 3
    alone.boundary()
    assert readable(alone) == 2


def test_without_an_optimizer_nobody_reads_from_the_backward_pass_on(alone: Any) -> None:
    """Nothing announces an update by hand: it was read while it was made, for the state after the step before."""
    passes = Passes(alone)
    for _ in range(3):
        passes.both()
    assert passes.forward == [None, 0, 1]
    assert passes.after == [None] * 3
    alone.boundary()
    assert readable(alone) == 2


def test_weights_that_an_optimizer_has_moved_for_a_pass_are_no_state(alone: Any) -> None:
    """SAM's: it moves them, has both passes made, and moves them back for the update."""
    import torch

    class Sam(torch.optim.SGD):
        def step(self, closure: Any) -> None:  # type: ignore[override]
            for sign in (1.0, -1.0):
                with torch.no_grad():
                    for p in alone.net.parameters():
                        p.add_(sign)
                if sign > 0:
                    closure()
            super().step()

    optimizer = Sam(alone.net.parameters(), 0.01)
    passes = Passes(alone)
    for _ in range(2):
        passes.both()  # in which nothing has moved yet
        optimizer.step(passes.both)
    assert passes.forward == [None, None, 1, None]
    assert passes.after == [None, None, 1, None]
    alone.boundary()
    assert readable(alone) == 3


def test_a_step_that_raises_is_not_made(alone: Any) -> None:
    import torch

    optimizer = torch.optim.SGD(alone.net.parameters(), 0.01)
    passes = Passes(alone)
    passes.both()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 // 0)
    alone.boundary()
    assert (alone.ended, readable(alone)) == (0, None)
    optimizer.step()
    alone.boundary()
    assert (alone.ended, readable(alone)) == (None, 0)


def test_nobody_takes_weights_that_are_swapped_for_an_evaluation(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a rank that is lost take another's state then: it would be overwritten by what is put back."""
    import torch

    looked: list[int | None] = []
    monkeypatch.setattr(alone, "rejoin", lambda: looked.append(readable(alone)))
    alone.ended = 4
    with alone.hold(changes=True):
        assert readable(alone) is None
        alone.net(torch.zeros(1, 4))
        assert looked == []
    assert readable(alone) == 4
    alone.net(torch.zeros(1, 4))
    assert looked == [4]
    with alone.hold():
        assert readable(alone) == 4


def test_applied_steps_go_through_the_scaler() -> None:
    """Averages have the loss scale."""
    import torch

    from tailbound.torch.catch_up import step_optimizers

    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 1.0)
    scaler = torch.amp.GradScaler("cpu", 65536.0)
    scaler.scale(torch.ones(1))
    one = lost(resync=SimpleNamespace(replica=SimpleNamespace(optimizers=[optimizer])), scaler=scaler)
    weight.grad = torch.full((1,), 65536.0)
    step_optimizers(one)
    assert weight.tolist() == [-1]


def test_a_wrapper_that_is_given_stands_for_what_is_in_it(alone: Any) -> None:
    """As Accelerate's: it was known beside the one in it, which then made every applied step twice."""
    import torch

    from tailbound.torch.catch_up import step_optimizers
    from tailbound.torch.recovery import Recovery

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer, self.param_groups = inner, inner.param_groups

        def step(self, closure: Any = None) -> None:
            self.optimizer.step()

    inner = torch.optim.SGD(alone.net.parameters(), 0.5)
    made: Any = Recovery(0, 2, (0, 0.0))
    made.communicator = alone.communicator
    given = Wrapper(Wrapper(inner))
    made.attach(alone.net, given)
    try:
        given.step()
        assert made.resync.replica.optimizers == [inner]
        before = alone.net.bias.item()
        alone.net.bias.grad = torch.ones(1)
        step_optimizers(made)
        assert alone.net.bias.item() == before - 0.5
    finally:
        made.detach()


def test_who_is_lost_again_while_a_state_comes_joins_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state took longer than the ring lasts: it was taken for nothing thirty times, then training ended."""
    from tailbound.torch import catch_up
    from tailbound.torch.finished import Layout

    job = SimpleNamespace(lost=True, behind=9, drain=lambda timeout: True)
    state: Any = lost(scaler=None, say=lambda *_: None)
    state.contributions = SimpleNamespace(forget=lambda: None)
    monkeypatch.setattr(Layout, "settled", True)
    taken: list[float] = []

    def jump() -> int:
        job.lost = False
        return 5

    def take(_state: Any, _job: Any, until: float) -> int:
        taken.append(until)
        job.lost, state.abstaining = True, False
        return 1

    job.jump = jump
    monkeypatch.setattr(catch_up, "take_state", take)
    assert catch_up.jump(state, job, 30.0) == 3 * 5 + 2
    assert len(taken) == 2
    assert (job.lost, state.abstaining) == (False, True)


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank that dies after the test's models: the last one would free it with the GIL held."""
    import torch.distributed as dist

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    yield
    dist.destroy_process_group()
    gc.collect()
    del group


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("how", ["deepcopy", "file"])
def test_a_copy_of_a_registered_model_is_plain_ddp(alone: Any, how: str) -> None:
    """It has no part in the job. A lock of the transport was to be copied, and could not be."""
    import copy
    import io

    import torch
    from torch.nn.parallel import DistributedDataParallel

    from tailbound.torch.hook import allreduce_hook
    from tailbound.torch.recovery import Recovery
    from tailbound.torch.state import TailboundState

    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    state: Any = TailboundState.__new__(TailboundState)  # without a job, which opens sockets
    Recovery.__init__(state, 0, 2, (0, 0.0))
    state.communicator = alone.communicator
    state.attach(model)
    model.register_comm_hook(state, allreduce_hook)
    if how == "file":
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        made: Any = torch.load(file, weights_only=False)
    else:
        made = copy.deepcopy(model)
    seen: list[int] = []
    state._before_forward = lambda *_: seen.append(0)
    state.before_backward = lambda: seen.append(0)
    for _ in range(3):
        made.zero_grad()
        made(torch.ones(2, 4)).sum().backward()
        assert made.module.bias.grad.item() == 2.0
    assert seen == []
    assert made._comm_hooks == [(allreduce_hook, None)]
    assert state.resync is not None
    state.detach()

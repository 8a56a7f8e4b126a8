"""When other threads may read a rank's state, between and within the steps of its program (clock-21)."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from solo import Job, without_job
from tailbound.transport.reliable import Refusal

pytest.importorskip("torch", reason="missing capability 'torch'")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tailbound.torch.absence import step_optimizers
from tailbound.torch.hook import allreduce_hook
from tailbound.torch.moment import Moment


@pytest.fixture
def alone() -> Iterator[Any]:
    """A rank that keeps the replica of ``net``, and whose averages are its own gradients."""
    communicator = Job({}, keeps=True)
    torch.manual_seed(0)
    made = without_job(communicator=communicator, net=torch.nn.Linear(4, 1))
    made.attach(made.net)
    yield made
    made._let_go()
    communicator.reliable.close()


def readable(one: Any) -> int | None:
    """The step after which others may read this rank's state now; None: they may not."""
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
        self.one.net.zero_grad()
        data = torch.arange(12.0).view(3, 4) / 12 + self.step
        loss = (self.one.net(data) - 1.0).square().mean()
        self.forward.append(readable(self.one))
        self.one.before_backward()
        loss.backward()
        self.step += 1
        self.one.steps.stepped, self.one.steps.ended = False, self.step
        self.after.append(readable(self.one))
        return loss.detach()


class Twice(torch.optim.SGD):
    """Makes both passes and an update two times in a step."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        for _ in range(2):
            closure()
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad, alpha=0.01)


class Sam(torch.optim.SGD):
    """Moves the weights, has both passes made, and moves them back for the update."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        for sign in (1.0, -1.0):
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.add_(sign)
            if sign > 0:
                closure()
        super().step()


@pytest.mark.parametrize(
    ("kind", "before", "closure", "forward", "after"),
    [
        (torch.optim.SGD, 1, False, [None, 0, 1], [None, 0, 1]),
        # Lightning makes both passes within ``step``: the replica went on counting as that before them
        (torch.optim.SGD, 0, True, [None, 0, 1], [None] * 3),
        # a second pass of the same step has no state that is whole
        (Twice, 0, True, [None, None, 1, None, 3, None], [None] * 6),
        (Sam, 1, True, [None, None, 1, None, 3, None], [None, None, 1, None, 3, None]),
    ],
)
def test_nobody_reads_while_an_optimizer_updates(
    alone: Any, kind: Any, before: int, closure: bool, forward: list[Any], after: list[Any]
) -> None:
    """``before``: passes before its ``step``; ``closure``: it makes some itself."""
    passes, updated = Passes(alone), list[int | None]()
    optimizer = kind(alone.net.parameters(), 0.01, momentum=0.9)
    optimizer.register_step_post_hook(lambda *_: updated.append(readable(alone)))
    for _ in range(3):
        for _ in range(before):
            passes.both()
        optimizer.step(*[passes.both] * closure)
    assert (passes.forward, passes.after, set(updated)) == (forward, after, {None})
    alone.boundary()
    assert readable(alone) == passes.step
    passes.both()
    with alone.hold():
        assert readable(alone) == passes.step - 1  # of a step that is half made
    optimizer.step(lambda: torch.zeros(()))
    with alone.hold():
        assert readable(alone) == passes.step


def test_without_an_optimizer_nobody_reads_from_the_backward_pass_on(alone: Any) -> None:
    """Nothing announces an update by hand: it was read while it was made, for the state after the step before."""
    passes = Passes(alone)
    for _ in range(3):
        passes.both()
    assert (passes.forward, passes.after) == ([None, 0, 1], [None] * 3)
    alone.boundary()
    assert readable(alone) == 2


def test_a_step_that_raises_is_not_made(alone: Any) -> None:
    optimizer = torch.optim.SGD(alone.net.parameters(), 0.01)
    passes = Passes(alone)
    passes.both()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 // 0)
    alone.boundary()
    assert (alone.steps.ended, readable(alone)) == (0, None)
    optimizer.step()
    alone.boundary()
    assert (alone.steps.ended, readable(alone)) == (None, 0)


def test_a_half_made_step_is_not_given_as_that_after_it(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``hold`` and ``boundary`` leave it open; ``synchronize`` compares it, and leaves it open then.

    States: partial to whole.
    """
    optimizer = torch.optim.SGD(alone.net.parameters(), 0.01)
    passes, met = Passes(alone), list[int]()
    monkeypatch.setattr(alone.resync, "synchronize", lambda _: met.append(alone.resync.moment.step) or True)
    passes.both()
    optimizer.step()
    passes.both()
    alone.boundary()
    with alone.hold():
        assert (alone.steps.ended, readable(alone)) == (1, 0)
    assert alone.synchronize()
    assert (alone.steps.ended, met, readable(alone)) == (1, [1], None)
    optimizer.step()
    with alone.hold():
        assert (alone.steps.ended, readable(alone)) == (None, 1)


def test_nobody_takes_weights_that_are_swapped_for_an_evaluation(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a rank that is lost take another's state then: it would be overwritten by what is put back."""
    looked: list[int | None] = []
    monkeypatch.setattr(alone, "rejoin", lambda: looked.append(readable(alone)))
    alone.steps.ended = 4
    with alone.hold(changes=True):
        assert readable(alone) is None
        alone.net(torch.zeros(1, 4))
        assert looked == []
    assert readable(alone) == 4
    alone.net(torch.zeros(1, 4))
    assert looked == [4]
    with alone.hold():
        assert readable(alone) == 4


def test_a_wrapper_that_is_given_stands_for_what_is_in_it(alone: Any) -> None:
    """As Accelerate's: it was known beside the one in it, which then made every applied step twice."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer, self.param_groups = inner, inner.param_groups

        def step(self, closure: Any = None) -> None:
            self.optimizer.step()

    inner = torch.optim.SGD(alone.net.parameters(), 0.5)
    made, given = without_job(communicator=alone.communicator), Wrapper(Wrapper(inner))
    made.attach(alone.net, given)
    given.step()
    assert made.optimizers == [inner]
    before, alone.net.bias.grad = alone.net.bias.item(), torch.ones(1)
    step_optimizers(made)
    assert alone.net.bias.item() == before - 0.5
    made._let_go()


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank that dies after the test's models: the last one would free it with the GIL held."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    yield
    dist.destroy_process_group()
    gc.collect()
    del group


def _through_a_file(model: Any) -> Any:
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("copied", [copy.deepcopy, _through_a_file])
def test_a_copy_of_a_registered_model_is_plain_ddp(alone: Any, copied: Callable[[Any], Any]) -> None:
    """It has no part in the job. A lock of the transport was to be copied, and could not be."""
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    state = without_job(communicator=alone.communicator)
    state.attach(model)
    model.register_comm_hook(state, allreduce_hook)
    made, seen = copied(model), list[int]()
    state._before_forward = lambda *_: seen.append(0)
    state.before_backward = lambda: seen.append(0)
    for _ in range(3):
        made.zero_grad()
        made(torch.ones(2, 4)).sum().backward()
        assert made.module.bias.grad.item() == 2.0
    assert seen == []
    assert made._comm_hooks == [(allreduce_hook, None)]
    assert state.resync is not None
    state._let_go()


PATIENCE = 30
LAST = (1 << 22) - 1  # steps are serial numbers


@pytest.mark.parametrize(
    ("done", "asked", "later", "said"),
    [
        ([], 4, False, "step 4 has not ended here yet"),
        ([("settle", 4)], 4, False, 4),
        ([("settle", 4)], 5, False, "step 5 has not ended"),
        ([("settle", 4)], 3, False, "step 3 is past"),
        ([("settle", 4)], 3, True, 4),
        ([("settle", 4), ("disturb",)], 4, False, "step 4 is past"),
        ([("settle", 4), ("disturb",)], 4, True, "not ended"),
        ([("settle", 4), ("close",)], 4, False, "closing"),
        ([("settle", LAST)], 0, False, "not ended"),
        ([("settle", LAST), ("settle", 0)], LAST, False, "past"),
        ([("settle", 4), ("change",)], 4, False, "step 4 is past"),  # nobody reads within, whatever settles there
        ([("settle", 4), ("change",), ("settle", 5)], 4, True, "not ended"),
        ([("settle", 4), ("change",), ("settle", 5), ("leave",)], 5, False, 5),
        ([("settle", 5), ("change",), ("disturb",), ("leave",)], 5, False, "step 5 is past"),
    ],
)
def test_only_the_step_asked_for_and_only_while_it_stands_still(
    done: list[tuple[Any, ...]], asked: int, later: bool, said: int | str
) -> None:
    moment = Moment()
    change = moment.change()
    within = {"change": change.__enter__, "leave": lambda: change.__exit__(None, None, None)}
    for name, *arguments in done:
        (within.get(name) or getattr(moment, name))(*arguments)
    if isinstance(said, str):
        with pytest.raises(Refusal, match=said), moment.reading(asked, 0, or_later=later):
            pass
    else:
        with moment.reading(asked, 0, or_later=later) as stands:
            assert stands == said


def test_a_reader_waits_for_the_step_and_a_change_waits_for_the_reader() -> None:
    moment, inside, go_on = Moment(), threading.Event(), threading.Event()
    log: list[str] = []

    def read() -> None:
        with moment.reading(7, PATIENCE):
            inside.set()
            assert go_on.wait(PATIENCE)
            log.append("read")

    with ThreadPoolExecutor() as threads:
        reader = threads.submit(read)
        moment.settle(6)
        moment.settle(7)
        assert inside.wait(PATIENCE)
        changer = threads.submit(lambda: moment.disturb() and log.append("changed"))
        go_on.set()
        assert [one.result(PATIENCE) for one in (reader, changer)] == [None, None]
    assert log == ["read", "changed"]

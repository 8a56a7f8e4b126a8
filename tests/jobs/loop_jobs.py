"""Training loops as people write them, and a rank that is away from each at every place of it.

One team of processes runs all cells of a table one after the other. The victim stops itself, and another rank lets it
go on once the others are some iterations further, or stand still since they wait for it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tailbound.torch import TailboundState, batches, elastic, register
from tailbound.torch.register import _SYNC_OPTION
from tailbound.torch.state import attached
from torch_jobs import Count, digest, everywhere, on_hosts, patient, refused, same_everywhere

SETTINGS: dict[str, Any] = {
    "datapath": "udp",
    "timeout": 30.0,
    "advanced": {"deadline_ms": (60.0, 60.0), "resync_share": 50.0},
    "mtu": 156,
}
#: Iterations of an epoch, and epochs; iterations that the others make while a rank is away.
EPOCH, EPOCHS, AWAY = 12, 3, 18
VICTIM, WAKER = 2, 0
#: Ranks that are killed, one after the other.
VICTIMS = (2, 0)
#: Where a rank pauses: the iteration that it is in or before, and whether in the middle of it. It is stopped or, where
#: all meet in a collective at the end of every epoch, does something else and does not ``hold``.
EVALUATES = "evaluates"
PAUSES = {
    "before the first": (0, False),
    "after the first": (1, False),
    "within": (5, True),
    "after an epoch": (EPOCH, False),
    EVALUATES: (EPOCH, False),
}


@dataclass
class Loop:
    """``iterate(i, within)`` makes an iteration, and calls ``within`` in the middle of it.

    Or a part of one: it returns whether there is more.
    """

    nets: list[DDP]
    optimizers: list[torch.optim.Optimizer]
    iterate: Callable[[int, Callable[[], object]], object]
    #: what else is to be equal in the end, and goes with a whole state
    extra: dict[str, Any] = field(default_factory=dict)
    #: around an epoch
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    #: iterations of an epoch that this rank leaves out
    fewer: int = 0
    #: iterations of an epoch by their numbers, of a loop that skips batches; what it does after an applied one
    epoch: Callable[[range, TailboundState, Callable[[], object]], Iterable[int]] = lambda numbers, *_: numbers
    #: MiB of the ring: as a rule a few iterations
    ring: float = 0.004
    schedules: list[Any] = field(default_factory=list)

    def step(self) -> None:
        for one in (*self.optimizers, *self.schedules):
            one.step()


def small(*sizes: int) -> nn.Module:
    sizes = sizes or (16, 16, 4)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def wrapped(net: nn.Module, group: Any, **options: Any) -> DDP:
    return DDP(net, process_group=group, bucket_cap_mb=options.pop("cap", 0.001), **{_SYNC_OPTION: False}, **options)


def data(rank: int, i: int, part: int = 0, size: int = 16) -> torch.Tensor:
    return torch.randn(4, size, generator=torch.Generator().manual_seed(1000 * i + 100 * part + rank))


def scheduled(loop: Loop) -> Loop:
    """Each optimizer has a schedule, which goes with a whole state."""
    loop.schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda k: 0.97**k) for one in loop.optimizers]
    loop.extra |= {f"schedule {number}": one for number, one in enumerate(loop.schedules)}
    made = loop.iterate

    def iterate(i: int, within: Callable[[], object]) -> None:
        if not made(i, within):
            for one in loop.schedules:
                one.step()

    loop.iterate = iterate
    return loop


def simple(
    rank: int,
    net: DDP,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    parts: int = 1,
    sync: bool = True,
    clip: bool = False,
    module: Any = None,
    inputs: Callable[..., torch.Tensor] = data,
    after: Callable[[], object] = lambda: None,
) -> Loop:
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), 0.02)
    called = net if module is None else module

    def iterate(i: int, within: Callable[[], object]) -> None:
        optimizer.zero_grad()
        for part in range(parts):
            with contextlib.nullcontext() if sync or part == parts - 1 else net.no_sync():
                called(inputs(rank, i, part)).square().mean().backward()
            if part == 0:
                within()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        after()

    return Loop([net], [optimizer], iterate)


def shared(rank: int, group: Any) -> Loop:
    """Two models in one optimizer."""
    a, b = wrapped(small(), group), wrapped(small(4, 8, 1), group)
    optimizer = torch.optim.AdamW([*a.parameters(), *b.parameters()], 0.02)

    def iterate(i: int, within: Callable[[], object]) -> None:
        optimizer.zero_grad()
        b(a(data(rank, i))).square().mean().backward()
        within()
        optimizer.step()

    return Loop([a, b], [optimizer], iterate)


def gan(rank: int, group: Any) -> Loop:
    """Two optimizers; the discriminator has two passes of its own and one of the generator's."""
    g, d = wrapped(small(4, 16, 4), group), wrapped(small(4, 16, 1), group)
    of_g, of_d = torch.optim.Adam(g.parameters(), 0.01), torch.optim.Adam(d.parameters(), 0.01)

    def iterate(i: int, within: Callable[[], object]) -> None:
        fake = g(data(rank, i, 1, 4))
        of_d.zero_grad()
        (d(data(rank, i, 0, 4)) - 1).square().mean().backward()
        d(fake.detach()).square().mean().backward()
        of_d.step()
        within()
        of_g.zero_grad()
        (d(fake) - 1).square().mean().backward()
        of_g.step()

    return Loop([g, d], [of_g, of_d], iterate)


def sam(rank: int, group: Any) -> Loop:
    net = wrapped(small(), group)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def iterate(i: int, within: Callable[[], object]) -> None:
        optimizer.zero_grad()
        net(data(rank, i)).square().mean().backward()
        before = [p.detach().clone() for p in net.parameters()]
        with torch.no_grad():
            for p in net.parameters():
                p.add_(p.grad, alpha=0.05)
        within()
        optimizer.zero_grad()
        net(data(rank, i)).square().mean().backward()
        with torch.no_grad():
            for p, was in zip(net.parameters(), before, strict=True):
                p.copy_(was)
        optimizer.step()

    return Loop([net], [optimizer], iterate)


def lbfgs(rank: int, group: Any) -> Loop:
    net = wrapped(small(), group)
    optimizer = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=1)

    def iterate(i: int, within: Callable[[], object]) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(data(rank, i)).square().mean()
            loss.backward()
            within()
            return loss

        optimizer.step(closure)

    return Loop([net], [optimizer], iterate)


class Taught(nn.Module):
    """A student, and a teacher that follows it and is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.student = small()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(x) - self.teacher(x) + 1

    @torch.no_grad()
    def follow(self) -> None:
        for s, t in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            t.mul_(0.9).add_(s, alpha=0.1)


def teacher(rank: int, group: Any) -> Loop:
    inner = Taught()
    optimizer = torch.optim.AdamW(inner.student.parameters(), 0.02)
    return simple(rank, wrapped(inner, group), optimizer, after=inner.follow)


def words(rank: int, i: int, part: int = 0) -> torch.Tensor:
    return torch.randint(0, 20, (4, 3), generator=torch.Generator().manual_seed(1000 * i + rank))


def sparse(rank: int, group: Any) -> Loop:
    net = wrapped(nn.Sequential(nn.EmbeddingBag(20, 8, sparse=True, mode="sum"), small(8, 8, 4)), group)
    return simple(rank, net, torch.optim.SGD(net.parameters(), 0.1), inputs=words)


def joined(rank: int, group: Any) -> Loop:
    net = wrapped(small(), group)
    loop = simple(rank, net)
    loop.around, loop.fewer = net.join, rank
    return loop


class Branches(nn.Module):
    """Uses one of two branches in turn; now and then half of the ranks use the other one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.stem, self.ways, self.used = small(), nn.ModuleList([small(4, 4), small(4, 4)]), rank % 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.used += 2
        return self.ways[(self.used // 2 + (self.used % 8 == 7)) % 2](self.stem(x))


def compiled(rank: int, group: Any) -> Loop:
    torch._dynamo.reset()
    net = wrapped(small(), group, cap=1)  # the compiler takes buckets of a MiB and more
    return simple(rank, net, module=torch.compile(net, backend="eager"))


def following(rank: int, group: Any, ring: float = 0.004) -> Loop:
    """Skips the batches of iterations that it was away for."""
    loop = simple(rank, wrapped(small(), group))
    loop.ring, loop.epoch = ring, lambda numbers, state, step: batches(numbers, state, step=step)
    return loop


def windowed(rank: int, group: Any, rest: int = -2) -> Loop:
    """Four batches make an iteration, and two the last one of an epoch."""
    net, part = wrapped(small(), group), 0
    optimizer = torch.optim.AdamW(net.parameters(), 0.02)

    def epoch(numbers: range, state: TailboundState, step: Callable[[], object]) -> Iterator[int]:
        nonlocal part
        for batch in batches(range(4 * len(numbers) + rest), state, step=step, per_step=4):
            part = batch % 4
            yield from numbers[batch // 4 :][:1]

    def iterate(i: int, within: Callable[[], object]) -> bool:
        more = part < (3 + min(0, rest) if i % EPOCH == EPOCH - 1 else 3)
        with net.no_sync() if more else contextlib.nullcontext():
            net(data(rank, i, part)).square().mean().backward()
        within()
        if not more:
            optimizer.step()
            optimizer.zero_grad()
        return more

    return Loop([net], [optimizer], iterate, epoch=epoch, ring=8.0)


LOOPS: Mapping[str, Callable[[int, Any], Loop]] = {
    "plain": lambda rank, group: simple(rank, wrapped(small(), group)),
    "accumulating": lambda rank, group: simple(rank, wrapped(small(), group), parts=3),  # averaged passes add up
    "accumulating_unsynced": lambda rank, group: simple(rank, wrapped(small(), group), parts=3, sync=False),
    "clipping": lambda rank, group: simple(rank, wrapped(small(), group), clip=True),
    "static": lambda rank, group: simple(rank, wrapped(small(), group, static_graph=True)),
    "unused": lambda rank, group: simple(rank, wrapped(Branches(rank), group, find_unused_parameters=True)),
    "applying": lambda rank, group: following(rank, group, 8.0),  # its ring holds all that a pause misses
    "dropping": lambda rank, group: windowed(rank, group, 2),  # nothing is made of the last two batches of an epoch
    **{one.__name__: one for one in (
        shared, gan, sam, lbfgs, teacher, sparse, joined, compiled, following, windowed
    )},
}  # fmt: skip


def held(loop: Loop) -> dict[str, str]:
    """Digests by part of what all ranks are to have alike; ``prev_loss`` of LBFGS is each rank's own."""
    optimizers = [one.state_dict() for one in loop.optimizers]
    parts: dict[str, Any] = {
        "parameters": [net.state_dict() for net in loop.nets],
        "optimizers": [
            {
                p: {name: value for name, value in kept.items() if name != "prev_loss"}
                for p, kept in one["state"].items()
            }
            for one in optimizers
        ],
        "rates": [[group["lr"] for group in one["param_groups"]] for one in optimizers],
        "extra": [one.state_dict() for one in loop.extra.values()],
    }
    return {name: digest(part) for name, part in parts.items()}


class Pause:
    """Stops the victim once, and lets it go on; or it waits by itself.

    ``still``: seconds without an iteration after which the others are taken to wait for it.
    """

    def __init__(self, rank: int, at: int, within: bool, *, stops: bool = True, still: float = 1.0) -> None:
        self._here = rank == (VICTIM if stops else WAKER)
        self._at, self._within, self._stops, self._still = at, within, stops, still
        self._i, self.over = -1, False
        pids = everywhere(os.getpid())
        if stops and rank == WAKER:
            threading.Thread(target=self._wake, args=(pids[VICTIM],), daemon=True).start()

    def reach(self, i: int, within: bool = False) -> None:
        self._i = i
        if self._here and (i, within) == (self._at, self._within) and not self.over:
            self.over = True
            if self._stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                self._await(lambda: max(state.behind for state in attached()))

    def _wake(self, pid: int) -> None:
        stat = Path(f"/proc/{pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            if self.over:
                return
            time.sleep(0.002)
        self._await(lambda: self._i - self._at)
        os.kill(pid, signal.SIGCONT)

    def _await(self, further: Callable[[], int]) -> None:
        """Until the others are ``AWAY`` steps ``further``, or stand still."""
        seen, since = further(), time.monotonic()
        while (now := further()) < AWAY and time.monotonic() < since + self._still:
            if now != seen:
                seen, since = now, time.monotonic()
            time.sleep(0.002)


def _registered(loop: Loop, stack: contextlib.ExitStack, options: dict[str, Any] = SETTINGS) -> list[TailboundState]:
    states = []
    for number, net in enumerate(loop.nets):
        optimizer, extra = loop.optimizers[min(number, len(loop.optimizers) - 1)], loop.extra if number == 0 else {}
        given = {"ring_mib": loop.ring} | options
        states.append(stack.enter_context(register(net, optimizer=optimizer, extra_state=extra, **given)))
    return states


def _paused(rank: int, name: str, place: str) -> dict[str, Any]:
    loop = scheduled(LOOPS[name](rank, None))
    # on a loaded machine the others stand still now and then before they meet
    options: dict[str, Any] = {"stops": False, "still": 3.0} if place == EVALUATES else {}
    pause, made = Pause(rank, *PAUSES[place], **options), 0
    with contextlib.ExitStack() as stack:
        states = _registered(loop, stack)
        for first in range(0, EPOCH * EPOCHS, EPOCH):
            with loop.around():
                for i in loop.epoch(range(first, first + EPOCH - loop.fewer), states[0], loop.step):
                    pause.reach(i)
                    loop.iterate(i, partial(pause.reach, i, True))
                    made += 1
                    time.sleep(0.002)
            if place == EVALUATES:
                dist.barrier()
        # what has its last pass after the others' is met first
        well = [state.synchronize(20) for state in reversed(states)]
        pause.over = True
        counters = [state.stats()["counters"] for state in states]
        return {
            "held": held(loop), "well": all(well), "steps": [state.communicator.step for state in states],
            "scheduled": [one.last_epoch for one in loop.schedules], "made": made,
            "jumps": sum(one.get("jumps", 0) for one in counters),
            "applied": sum(one.get("steps_applied", 0) for one in counters),
        }  # fmt: skip


def paused(rank: int, table: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """What this rank holds at the end of each cell: loop and pause."""
    return [_paused(rank, *cell) for cell in table]


def _whole(loop: Loop) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for net in loop.nets for p in net.parameters()])


def parity(rank: int, here: int, *names: str) -> None:
    """Each loop moves its parameters as under plain DDP, and gives gradients to the same of them.

    ``here``: ranks of a host. Codes are of 16 bits, so that Adam sees the same signs.
    """
    options = patient(bits=16) | on_hosts(rank, here)
    for name in names:
        ends, given = list[torch.Tensor](), list[list[bool]]()
        for ours in (False, True):
            torch.manual_seed(0)
            loop = LOOPS[name](rank, None)
            with contextlib.ExitStack() as stack:
                states = _registered(loop, stack, options) if ours else []
                begun = _whole(loop)
                with loop.around():
                    for i in range(8 - loop.fewer):
                        loop.iterate(i, lambda: None)
                        given.append([p.grad is None for net in loop.nets for p in net.parameters()])
                assert all(state.last.error is None for state in states)
            ends.append(_whole(loop) - begun)
        plain, own = ends
        assert float((own - plain).norm() / plain.norm()) < 0.01, name
        assert given[: len(given) // 2] == given[len(given) // 2 :], name
        assert same_everywhere(own.tolist()), name


def killed(rank: int, name: str, dead: Any, at: Any, last: Any) -> dict[str, Any]:
    """Each victim is killed in the middle of an iteration and comes back, one after the other; then the job ends.

    Args:
        dead: shared integers, the iterations in which ranks were killed; -1: it was not.
        at: a shared integer, the iteration in which the next one is killed.
        last: a shared integer, after so many iterations the job ends; -1: not known yet.
    """
    loop, count, seen = scheduled(LOOPS[name](rank, elastic.alone())), Count(), dict[int, dict[str, Any]]()
    loop.extra["count"] = count
    with contextlib.ExitStack() as stack:
        (state,) = _registered(loop, stack)
        back = dead[rank] >= 0

        def within() -> None:
            victim = next((one for one in VICTIMS if dead[one] < 0), None)
            if rank == victim and count.made >= at.value:
                dead[rank], at.value = count.made, 1 << 30
                os.kill(os.getpid(), signal.SIGKILL)

        while not 0 <= last.value <= count.made:
            state.boundary()
            if not state.outside:
                seen[count.made] = {"held": held(loop), "sound": state.resync.sound, "waited": set()}
                if back:
                    back, event = False, last if rank == VICTIMS[-1] else at
                    event.value = count.made + 20
            loop.iterate(step := count.made, within)
            if step in seen:
                seen[step]["waited"] = state.last.missing - set(state.stats()["suspects"])
            count.made += 1
        return {"well": state.synchronize(20), "held": held(loop), "seen": seen}


def barred(rank: int, table: Mapping[str, str]) -> None:
    """What each loop is told in a job whose ranks may come back; no rank has made a step then."""
    for name, words in table.items():
        loop = LOOPS[name](rank, elastic.alone())

        def starts(loop: Loop = loop) -> None:
            with contextlib.ExitStack() as stack:
                for _ in _registered(loop, stack):
                    stack.enter_context(loop.around())
                    loop.iterate(0, lambda: None)

        refused(words, starts, Exception)  # PyTorch wraps what a hook raises

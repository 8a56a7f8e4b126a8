"""What the processes of the FSDP tests do: two hosts of two ranks each, as a 2 x 2 mesh of processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_jobs as jobs
from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError
from tailbound.torch import GradScaler, batches, fsdp
from tailbound.torch.replica import local

HALF = torch.bfloat16
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=HALF, cast_forward_inputs=True),
    "bf16, reduced in float32": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32),
    # FSDP divides by a part of the number of shards before the hook, and by the rest after it
    "fp16": MixedPrecisionPolicy(reduce_dtype=torch.float16),
}
#: Other codes than u8, and the NMSE of a mean that they allow (tests/unit/test_codec_error.py).
CODES: dict[str, Any] = {"bits": (4, 8), "error_feedback": False}
CODES_BOUND = 0.03


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None, seed: int = 0) -> nn.Module:
    """The model of the other tests: two of its layers are FSDP modules of their own, the rest goes with the root."""
    net = jobs.model(seed)
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return fully_shard(net, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())


def held(net: nn.Module, *, gradients: bool = False) -> str:
    """Digest of the shards that this rank holds."""
    return jobs.digest([local(p.grad if gradients else p) for p in net.parameters()])


def same(value: Any, mesh: DeviceMesh) -> bool:
    """Whether ``value`` is the same on all replicas."""
    return jobs.same_everywhere(value, mesh["replicate"].get_group())


@contextlib.contextmanager
def trio(
    mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None, **options: Any
) -> Iterator[tuple[nn.Module, nn.Module, nn.Module, fsdp.FsdpState]]:
    """The same model three times: plain DDP, plain HSDP, and FSDP with Tailbound between the replicas."""
    ours = sharded(mesh["shard"], policy)
    with fsdp.register(ours, mesh["replicate"], **jobs.PATIENT, **options) as state:
        yield DDP(jobs.model()), sharded(mesh, policy), ours, state


def parity(rank: int) -> None:
    """Gradients of HSDP over Tailbound against those of plain HSDP and of DDP over all four, by policy and code."""
    mesh = grid()
    for kind, policy, bound, options in (
        *((kind, policy, jobs.BOUND, {}) for kind, policy in POLICIES.items()),
        ("codes", POLICIES["float32"], CODES_BOUND, CODES),
    ):
        errors, apart = [], []
        with trio(mesh, policy, **options) as (plain, hsdp, ours, state):
            for step in range(3):
                jobs.passes((plain, hsdp, ours), rank, step)
                errors.append(jobs.nmse(jobs.gradient(ours), jobs.gradient(hsdp)))
                apart.append(jobs.nmse(jobs.gradient(ours), jobs.gradient(plain)))
                assert errors[-1] <= 3 * bound, f"{kind}, step {step}: NMSE {errors[-1]}"
                assert same(held(ours, gradients=True), mesh), f"{kind}, step {step}: replicas have other bits"
            stats = state.stats()
            assert (state.communicator.step, stats["delivered"]) == (3, 1.0)
            assert stats["counters"]["ops"] == 3 * 3 + 1  # three modules a step, and once an op that ends the first one
        assert sum(errors) / len(errors) <= bound, errors
        assert sum(apart) / len(apart) <= 2 * bound, apart


_IN_TURN = ["launch 2", "wait 2", "launch 0", "wait 0", "launch 1", "wait 1"]
_TOGETHER = ["launch 2", "launch 0", "launch 1", "wait 2", "wait 0", "wait 1"]
_SEEN = ["launch 2", "wait 2", "launch 0", "launch 1", "wait 0", "wait 1"]
#: What is launched and waited for in each pass. Averages are awaited at the end of the backward pass, unless gradients
#: are seen before.
OVERLAPPING = {
    "first": [*_IN_TURN, "launch 3", "wait 3"],
    "usual": _TOGETHER,
    "raises": ["launch 2"],
    "after it": ["launch 3", "wait 2", "wait 3", "launch 2", "wait 2", *_TOGETHER[1:3], "wait 0", "wait 1"],
    "divides": _TOGETHER,
    "after that": _SEEN,
    "usual again": _TOGETHER,
    "accumulating": _IN_TURN,
    "a hook looks": _SEEN,
}


def overlapping(rank: int) -> None:
    """What is launched and waited for in a pass: the first one, a usual one, and those in which gradients are used.

    Behind its first module one of them raises, as its average does later, and another one divides its gradient.
    """
    mesh, events, told = grid(), list[str](), {}
    with trio(mesh) as (_, hsdp, ours, state):
        average = state._average

        class Watched:
            """A future that says when it is waited for."""

            def __init__(self, number: int, future: torch.futures.Future[torch.Tensor]) -> None:
                self.number, self.future, self.what = number, future, what

            def wait(self) -> torch.Tensor:
                events.append(f"wait {self.number}")
                value = self.future.wait()
                if self.what == "raises":
                    raise OSError("of a pass that nobody asks about any more")
                return value

        def watched(number: int, shard: torch.Tensor, last: bool) -> Watched:
            events.append(f"launch {number}")
            return Watched(number, average(number, shard, last))

        state._average = watched
        seen: list[torch.Tensor] = []
        weight = ours[2].weight

        def meddle(_: torch.Tensor) -> None:
            if what == "raises":
                raise OSError(what)
            if what == "divides":
                local(weight.grad).div_(2.0)

        for net in (hsdp, ours):
            net[1].register_forward_hook(lambda _, given, out: out.register_hook(meddle) and None)
        for what in OVERLAPPING:
            if what in ("raises", "divides"):
                # FSDP adds what a broken pass leaves of the root's gradients to those of the next one
                for net in (hsdp, ours) if what == "raises" else (ours,):
                    said = broken_off(net, rank, len(told))
                    assert ("module 2 are not averaged" if what == "divides" else what) in said, said
                told[what], events[:] = list(events), []
                continue
            if what == "a hook looks":
                handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(local(p.grad).clone()))
            for net in (hsdp, ours):
                if what != "accumulating":  # onto what the pass before has left
                    net.zero_grad()
                jobs.backward(net, rank, len(told))
            assert jobs.nmse(jobs.gradient(ours), jobs.gradient(hsdp)) <= 3 * jobs.BOUND, what
            assert same(held(ours, gradients=True), mesh), what
            told[what], events[:] = list(events), []
        handle.remove()
        assert torch.equal(seen[0], local(weight.grad))
        assert state.communicator.step == len(told)
    assert told == OVERLAPPING


def broken_off(net: nn.Module, rank: int, step: int) -> str:
    """What a backward pass has raised, and all behind it as FSDP wants it then."""
    net.zero_grad()
    said = "nothing"
    try:
        jobs.backward(net, rank, step)
    except (OSError, ConfigError) as error:
        said = str(error)
    net.reset_iter_state()
    return said


class Fork(nn.Module):
    """A chain of which each half can be left out; the root has no parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor, which: set[int]) -> torch.Tensor:
        for number in sorted(which):
            x = self.halves[number](x)
        return x


def unlike(rank: int) -> None:
    """Steps end whatever modules a pass goes through, and where it accumulates."""
    mesh = grid()
    with trio(mesh) as (plain, hsdp, ours, state):
        for step in range(3):
            for net in (plain, hsdp, ours):
                net.zero_grad()
            for part in range(3):
                for net in (hsdp, ours):
                    net.set_requires_gradient_sync(part == 2)
                with plain.no_sync() if part < 2 else contextlib.nullcontext():
                    jobs.backward(plain, rank, 10 * step + part)
                jobs.backward(hsdp, rank, 10 * step + part)
                jobs.backward(ours, rank, 10 * step + part)
            assert jobs.nmse(jobs.gradient(ours), jobs.gradient(hsdp)) <= 3 * jobs.BOUND
            assert jobs.nmse(jobs.gradient(ours), jobs.gradient(plain)) <= 3 * jobs.BOUND
            assert state.communicator.step == step + 1

    net, alone = Fork(), Fork()
    for half in net.halves:
        fully_shard(half, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    with fsdp.register(net, mesh["replicate"], **jobs.PATIENT) as state:
        for step, which in enumerate(({0, 1}, {0, 1}, {1}, {1}, {0}, {0, 1}, {0, 1})):
            net.zero_grad()
            alone.zero_grad()
            net(inputs(rank), which).square().sum().backward()
            for other in range(4):
                (alone(inputs(other), which).square().sum() / 4).backward()
            for number in which:
                value, exact = jobs.gradient(net.halves[number]), jobs.gradient(alone.halves[number])
                assert jobs.nmse(value, exact) <= 3 * jobs.BOUND, (which, number)
            assert state.communicator.step == step + 1


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))


def equal_replicas(rank: int) -> None:
    """Replicas begin equal whatever the seeds, and one that has gone astray takes the others' shards and moments."""
    mesh = grid()
    host = mesh.get_local_rank("replicate")
    ours = sharded(mesh["shard"], seed=host)
    assert not same(held(ours), mesh)
    optimizer = torch.optim.Adam(ours.parameters(), 0.01)
    with fsdp.register(ours, mesh["replicate"], optimizer=optimizer, **jobs.PATIENT) as state:
        assert same(held(ours), mesh)
        jobs.train(ours, optimizer, rank, range(4))
        assert same(held(ours), mesh)
        state.boundary()
        if host == 1:
            with torch.no_grad():
                for p in ours.parameters():
                    local(p).add_(1.0)
                    local(optimizer.state[p]["exp_avg"]).zero_()
            state.resync.unsound()
        assert not same(held(ours), mesh)
        assert state.synchronize(30.0)
        assert same(held(ours), mesh)
        moments = [local(optimizer.state[p]["exp_avg"]).sum().item() for p in ours.parameters()]
        assert same(moments, mesh)
        assert any(moments)
        assert (state.resync.counters["slices_taken"] > 0) == (rank >= 2)


def _second_void(rank: int, change: dict[str, Any]) -> list[tuple[bool, bool]]:
    """Of two steps whether they move this rank's shards, and its state is sound; outcomes of the second ``change``."""
    mesh, step, found = grid(), 0, []
    net = sharded(mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    with fsdp.register(net, mesh["replicate"], optimizer=optimizer, **jobs.PATIENT) as state:
        launch = state.communicator.launch

        def launched(*values: Any, done: Callable[[Outcome], None], **options: Any) -> None:
            def told(outcome: Outcome, changed: dict[str, Any] = change if step else {}) -> None:
                done(dataclasses.replace(outcome, **changed))

            launch(*values, done=told, **options)

        state.communicator.launch = launched
        for step in range(2):
            before = held(net)
            jobs.passes([net], rank, step)
            sound = state.resync.sound
            optimizer.step()
            found.append((held(net) != before, sound))
    return found


def voided(rank: int) -> None:
    """All shards of a host leave the step out that one of them finds void. Rule: clock-38.

    Each of them decided for itself, so that a replica went on by a part of its update. Where all hosts find no majority
    for a shard they leave it out alike; where one host alone skips its step, both of its shards are unsound.
    """
    assert _second_void(rank, {"minority": True} if rank % 2 else {}) == [(True, True), (False, True)]
    alone = _second_void(rank, {"skipped": True, "doubtful": 1} if rank == 1 else {})
    assert alone == [(True, True), (rank >= 2, rank >= 2)]


def refusals(rank: int) -> None:
    """Everything that cannot be is said before a step."""
    mesh = grid()
    plain = sharded(mesh["shard"])
    jobs.refused("mesh['replicate']", lambda: fsdp.register(plain, mesh, **jobs.PATIENT))
    jobs.refused("got a Sequential", lambda: fsdp.register(jobs.model(), mesh["replicate"], **jobs.PATIENT))
    jobs.refused("averaged twice", lambda: fsdp.register(sharded(mesh), mesh["replicate"], **jobs.PATIENT))
    jobs.refused("no replicas", lambda: fsdp.register(plain, mesh["shard"], **jobs.PATIENT))
    jobs.refused("2 shards are 2 jobs", lambda: fsdp.register(plain, mesh["replicate"], switch="10.0.0.9"))
    with mock.patch.dict(os.environ, TAILBOUND_SWITCH="10.0.0.9"):  # the variable was not read
        jobs.refused("2 shards are 2 jobs", lambda: fsdp.register(plain, mesh["replicate"]))
    with torch.device("meta"):
        unmade = sharded(mesh["shard"])
    jobs.refused("is on meta", lambda: fsdp.register(unmade, mesh["replicate"], **jobs.PATIENT))
    with fsdp.register(plain, mesh["replicate"], **jobs.PATIENT) as state:
        jobs.refused("leave out tailbound.torch.batches", lambda: next(batches([1], state)))
        jobs.refused("leave out tailbound.torch.batches", state.catch_up)
        jobs.refused("a job of its own, with a loss scale of its own", lambda: GradScaler(state))
        stock, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(plain.parameters(), 0.1)
        stock.scale(jobs.loss(plain, rank, 0)).backward()
        jobs.refused("a job of its own, with a loss scale of its own", lambda: stock.step(optimizer))


def alone(rank: int) -> None:
    """Hosts of one: nothing to average, and the gradients are FSDP's own."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    ours, plain = sharded(mesh["shard"]), sharded(mesh["shard"])
    with fsdp.register(ours, mesh["replicate"], **jobs.PATIENT) as state:
        for net in (ours, plain):
            jobs.backward(net, rank, 0)
        assert torch.equal(jobs.gradient(ours), jobs.gradient(plain))
        assert state.stats()["ranks"] == 1

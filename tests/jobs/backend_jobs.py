"""What the processes of the tests of the backend ``tailbound`` do; one function a job, several checks in each."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_jobs
from tailbound.errors import LayoutError, TransportError
from tailbound.torch import BackendOptions, TailboundProcessGroup, backend, bounded, end_step, exact, register
from torch_jobs import BOUND, PATIENT, alike, backward, digest, gradient, model, nmse, passes, refused, same_everywhere

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX


def patient(**more: Any) -> BackendOptions:
    return BackendOptions(**torch_jobs.patient(**more))


def values(rank: int, numel: int = 5000, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def mean_of(ranks: int, numel: int = 5000, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([values(r, numel, seed, dtype).double() for r in range(ranks)]).mean(0)


def ours(group: dist.ProcessGroup | None = None) -> TailboundProcessGroup:
    found = group or dist.group.WORLD
    assert isinstance(found, TailboundProcessGroup)
    return found


def ops(group: dist.ProcessGroup | None = None) -> int:
    """Bounded ops that this rank has seen the end of."""
    return ours(group).stats().get("counters", {}).get("ops", 0)


def dropped(rank: int) -> None:
    """Tensors whose last reference is Gloo's: its threads need the interpreter lock while more operations come."""
    ranks = dist.get_world_size()

    def parts() -> list[torch.Tensor]:
        return list(torch.ones(ranks, 4))

    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.ones(4), async_op=True),
        lambda: dist.all_reduce_coalesced([torch.ones(4), torch.ones(4)], async_op=True),
        lambda: dist.broadcast(torch.ones(4), 0, async_op=True),
        lambda: dist.all_gather(parts(), torch.ones(4), async_op=True),
        lambda: dist.all_gather_into_tensor(torch.ones(4 * ranks), torch.ones(4), async_op=True),
        lambda: dist.reduce_scatter(torch.ones(4), parts(), async_op=True),
        lambda: dist.all_to_all_single(torch.ones(4 * ranks), torch.ones(4 * ranks), async_op=True),
        lambda: dist.reduce(torch.ones(4), 0, async_op=True),
        lambda: dist.barrier(async_op=True),
    ]
    for call in calls:
        for _ in range(50):
            for _ in range(3):
                call()
            dist.barrier()  # one of the group's operations, with more of them under way


def outlived(rank: int) -> None:
    """The reducer of a model has the last reference to its group, some of whose operations have only just ended."""
    for _ in range(5):
        group = dist.new_group(pg_options=patient())
        net = DDP(model(), process_group=group)
        backward(net, rank, 0)
        for _ in range(30):
            dist.all_reduce(torch.ones(4), group=group, async_op=True)
        dist.destroy_process_group(group)
        del group, net
        gc.collect()


def collectives(rank: int) -> None:
    """Without being asked for bounds: the same bits as over Gloo for every type, and no job of ours at all."""
    gloo = dist.new_group(backend="gloo")
    assert dist.get_backend() == "tailbound"
    assert ours().getBackendName() == "tailbound"
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.complex64):
        for op in (SUM, MAX) if dtype != torch.complex64 else (SUM,):
            mine, theirs = ((10 * values(rank)).to(dtype) for _ in range(2))
            dist.all_reduce(mine, op)
            dist.all_reduce(theirs, op, gloo)
            assert torch.equal(mine, theirs), (dtype, op)
    ours().allreduce(mine := values(rank), SUM).wait()
    dist.all_reduce_coalesced([theirs := values(rank)], group=gloo)
    assert torch.equal(mine, theirs)
    assert torch.equal(mine, functional.all_reduce(values(rank), "sum", ours()))
    ranks, everyone = dist.get_world_size(), torch.arange(dist.get_world_size()).tolist()
    assert functional.all_gather_tensor(torch.tensor([rank]), 0, ours()).tolist() == everyone
    for call, given in (
        (dist.all_to_all_single, torch.full((ranks,), float(rank))),
        (dist.all_gather_into_tensor, torch.tensor([float(rank)])),
    ):
        call(out := torch.empty(ranks), given)
        assert out.tolist() == everyone
    dist.reduce_scatter_tensor(out := torch.empty(5), torch.ones(5 * ranks))
    assert out.eq(ranks).all()
    assert ours().state is None


def kinds(rank: int) -> None:
    """What is bounded within ``bounded()``, for every type and layout, and what stays exact."""
    ranks = dist.get_world_size()
    group = ours(dist.new_group(pg_options=patient()))
    size = itertools.count(5000, 100)

    def coalesced(value: torch.Tensor) -> None:
        with dist._coalescing_manager(group, async_ops=True) as waiting:
            dist.all_reduce(torch.ones(200).to(value), group=group)
            dist.all_reduce(value, group=group)
        waiting.wait()

    def waited(value: torch.Tensor) -> None:
        work = dist.all_reduce(value, SUM, group, async_op=True)
        work.wait()
        assert work.is_completed()
        assert work.is_success()

    def then(value: torch.Tensor) -> torch.Tensor:
        future = dist.all_reduce(value, AVG, group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0] * 2).wait()

    calls: list[tuple[Callable[[torch.Tensor], torch.Tensor | None], int]] = [
        (lambda value: dist.all_reduce(value, SUM, group), ranks),
        (lambda value: dist.all_reduce(value, AVG, group), 1),
        (lambda value: dist.all_reduce(value.view(50, -1).t(), SUM, group), ranks),
        (lambda value: dist.all_reduce(value.requires_grad_(), SUM, group), ranks),
        (lambda value: dist.all_reduce_coalesced([torch.ones(300).to(value), value], group=group), ranks),
        (lambda value: functional.all_reduce(value, "avg", group), 1),
        (lambda value: group.allreduce(value, SUM).wait() and None, ranks),
        (coalesced, ranks),
        (waited, ranks),
        (then, 2),
    ]
    with bounded(group):
        for number, (call, factor) in enumerate(calls):
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                around = torch.zeros(3, n := next(size), dtype=dtype)
                value = around[1].copy_(values(rank, n, dtype=dtype)) if number < 3 else values(rank, n, dtype=dtype)
                given = call(value)
                average = (value if given is None else given).detach()
                error = nmse(average.double(), factor * mean_of(ranks, n, dtype=dtype))
                assert 0 < error <= BOUND, (number, dtype, error)
                assert average.dtype == dtype
                assert same_everywhere(average.tolist())
                assert not around[::2].any()
        dist.all_reduce(scalar := torch.tensor(1.0 + rank), AVG, group)
        assert abs(float(scalar) - (1 + (ranks - 1) / 2)) < 0.1
        before = ops(group)

        integers = torch.arange(100) + rank
        dist.all_reduce(integers, SUM, group)
        assert torch.equal(integers, torch.arange(100) * ranks + ranks * (ranks - 1) // 2)
        largest = values(rank)
        dist.all_reduce(largest, MAX, group)
        assert torch.equal(largest, torch.stack([values(r) for r in range(ranks)]).amax(0))
        dist.all_reduce(torch.empty(0), SUM, group)
        sparse = torch.eye(3).to_sparse()
        dist.all_reduce(sparse, SUM, group)
        assert torch.equal(sparse.to_dense(), torch.eye(3) * ranks)
        with exact(group):
            loss = torch.tensor(0.1 * rank, dtype=torch.float64)
            dist.all_reduce(loss, SUM, group)
            assert abs(float(loss) - 0.1 * ranks * (ranks - 1) / 2) < 1e-12
        dist.broadcast(sent := values(rank), 0, group)
        assert torch.equal(sent, values(0))
        dist.barrier(group)
        assert ops(group) == before
        with bounded(group):
            pass
        dist.all_reduce(values(rank), SUM, group)
        assert ops(group) == before + 1
    dist.all_reduce(last := values(rank), SUM, group)
    dist.all_reduce(check := values(rank), SUM)
    assert torch.equal(last, check)
    assert ops(group) == before + 1
    assert group.stats()["delivered"] == 1.0
    dist.destroy_process_group(group)
    with bounded():
        group.bounded_now = True
        refused("has been shut down", lambda: group.allreduce([values(rank)]), TransportError)


def told(rank: int) -> None:
    """Steps end where the caller says, also where one is not like the one before."""
    group, ranks = ours(), dist.get_world_size()
    for step, sizes in enumerate([(5000,)] * 3 + [(700, 700, 5000, 700)] * 4 + [(5000,)] * 2):
        with bounded(group):
            for place, numel in enumerate(sizes):
                value = values(rank, numel, place)
                dist.all_reduce(value, AVG)
                assert nmse(value.double(), mean_of(ranks, numel, place)) < BOUND
        end_step()
        assert group.state is not None
        assert group.state.communicator is not None
        group.state.communicator.drain(20)
        assert group.state.communicator.step == step + 1
    gloo = dist.new_group(backend="gloo")
    refused("backend 'gloo'", lambda: end_step(gloo))


def groups(rank: int, store_file: str) -> None:
    """The group option, groups of some ranks at the same time, a group of one, and all of it again after destroy."""
    for turn in range(2):
        if turn:
            dist.destroy_process_group()
            store = dist.FileStore(store_file, 3)
            dist.init_process_group("tailbound", store=store, rank=rank, world_size=3, pg_options=patient(bounded=True))
        pairs = [dist.new_group(pair, pg_options=patient(bounded=True)) for pair in ([0, 1], [1, 2], [0, 2])]
        alone = [dist.new_group([r], pg_options=patient(bounded=True)) for r in range(3)]
        for step in range(3):
            for pair, group in zip(([0, 1], [1, 2], [0, 2]), pairs, strict=True):
                if rank in pair:
                    value = values(rank, seed=step)
                    dist.all_reduce(value, AVG, group)
                    right = sum(values(r, seed=step).double() for r in pair) / 2
                    assert 0 < nmse(value.double(), right) <= BOUND
                    assert ops(group) == step + 1
        value = values(rank)
        dist.all_reduce(value, SUM, alone[rank])
        assert torch.equal(value, values(rank))
        assert ours(alone[rank]).state is None
        dist.all_reduce(value)
        error = nmse(value.double(), 3 * mean_of(3))
        assert (0 < error <= BOUND) if turn else error < 1e-12
        with exact():
            dist.all_reduce(value := values(rank))
        assert nmse(value.double(), 3 * mean_of(3)) < 1e-12
        if turn == 0:
            cookies = {ours(g).state.communicator.job.cookie for g in pairs if isinstance(g, TailboundProcessGroup)}
            assert len(cookies) == 2  # each its own job
            gloo = dist.new_group(backend="gloo")
            with bounded(pairs[0] if rank < 2 else pairs[1]):
                refused("backend 'gloo'", lambda gloo=gloo: bounded(gloo))


def training(rank: int) -> None:
    """DDP without a hook within ``bounded()``, as a step's whole backward; DDP with our hook over this backend.

    Both beside plain DDP over Gloo.
    """
    gloo = dist.new_group(backend="gloo")
    group = dist.new_group(pg_options=patient())
    plain = DDP(model(), process_group=gloo, bucket_cap_mb=0.05)
    within = DDP(model(), process_group=group, bucket_cap_mb=0.05)
    hooked = DDP(model(), bucket_cap_mb=0.05)
    errors = []
    with register(hooked, **PATIENT) as state:
        for step in range(6):
            for net in (plain, within, hooked):
                net.zero_grad()
                with bounded(group) if net is within else contextlib.nullcontext():
                    backward(net, rank, step)
            end_step(group)
            for net in (within, hooked):
                errors.append(nmse(gradient(net), gradient(plain)))
                assert 0 < errors[-1] <= 3 * BOUND
                assert same_everywhere(digest(gradient(net)))
        assert state.last.error is None
        assert sum(errors) / len(errors) <= BOUND, errors
    before = ops(group)
    passes((within, plain), rank, 0)
    assert torch.equal(gradient(within), gradient(plain))
    assert ops(group) == before
    assert ours(group).stats()["delivered"] == 1.0
    dist.destroy_process_group()


def compiled(rank: int) -> None:
    """Steps under ``torch.compile``: functional collectives within, ``dist.all_reduce`` within, DDP around."""
    ranks = dist.get_world_size()
    group = dist.new_group(pg_options=patient())

    def functionally(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(2 * x, "sum", group) + 1

    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = 2 * x
        dist.all_reduce(y, group=group)
        return y + 1

    def asks(x: torch.Tensor) -> torch.Tensor:
        with bounded(group):
            y = in_place(x)
        return y + in_place(x)

    def apart(function: Callable[[torch.Tensor], torch.Tensor], times: int = 1) -> tuple[float, int]:
        """How far the compiled ``function`` is from right, and how many of its ops are bounded."""
        before, out = ops(group), torch.compile(function, backend="aot_eager")(values(rank))
        return nmse(out.double() - times, times * 2 * ranks * mean_of(ranks)), ops(group) - before

    for function in (functionally, in_place):
        error, count = apart(function)
        assert (error < 1e-12, count) == (True, 0)
        with bounded(group):
            error, count = apart(function)
        assert (0 < error <= BOUND, count) == (True, 1)
    error, count = apart(asks, 2)
    assert (0 < error <= BOUND, count) == (True, 1)
    net = DDP(model(), process_group=group)  # the compiler wants no smaller buckets than the first one
    plain = DDP(model())
    fast = torch.compile(net, backend="aot_eager")
    for step in range(3):
        passes([plain], rank, step)
        with bounded(group):
            passes([fast], rank, step)
        assert nmse(gradient(net), gradient(plain)) > 0
        alike(net, plain)
    dist.destroy_process_group()


def refusals(rank: int) -> None:
    """What cannot be is said by an error that names what to do."""
    refused("deadline_seconds", lambda: BackendOptions(deadline_seconds=3))
    refused("BackendOptions", lambda: dist.new_group(pg_options={"bounded": True}))
    gloo = dist.new_group(backend="gloo")
    refused("backend 'gloo'", lambda: bounded(gloo))
    with bounded():
        refused("only CPU tensors", lambda: ours().allreduce([torch.zeros(3, device="meta")]))

    def summed(group: dist.ProcessGroup, numel: int = 5000) -> None:
        dist.all_reduce(torch.zeros(numel), group=group)

    group = dist.new_group(pg_options=BackendOptions(interface="nosuch0", bounded=True))
    refused("nosuch0", lambda: summed(group))
    backend.MAX_STEP_OPS = 4
    small = dist.new_group(pg_options=patient(ring_mib=0.1, bounded=True))
    refused("larger ring", lambda: summed(small, 1 << 20))
    usual = dist.new_group(pg_options=patient(bounded=True))
    for _ in range(2):
        for _ in range(3):
            summed(usual)
        refused("call tailbound.torch.end_step() on all ranks", lambda: summed(usual))
        end_step(usual)


def disagreement(rank: int) -> None:
    """Ranks that all-reduce other sizes are named by ``wait`` and by the future, and the process lives on."""
    for way in ("wait", "future"):
        group = dist.new_group(pg_options=patient(deadline_ms=(200.0, 200.0), bounded=True))
        work = dist.all_reduce(torch.ones(100 + 50 * rank), group=group, async_op=True)
        text = refused("rank 0", work.wait if way == "wait" else work.get_future().wait, Exception)
        assert "rank 1" in text
        assert isinstance(work.exception(), LayoutError)
        assert not work.is_success()

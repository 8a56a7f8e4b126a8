"""What the processes of the tests of several ranks a host do: hosts of two ranks each on one machine."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_jobs as jobs
from plain_form import PLAIN
from tailbound.collective.communicator import Communicator
from tailbound.errors import TransportError
from tailbound.torch import batches, node_shards, node_state, register
from tailbound.torch import state as base
from tailbound.torch.node_state import NodeState
from tailbound.torch.paths import Paths
from tailbound.torch.streams import Stream

#: Where the job of a rank ends and the rank does not: the others wait for it in every op until they suspect it.
HASTY = jobs.patient(deadline_ms=(200.0, 200.0), patience="cloud")


@contextlib.contextmanager
def shared(rank: int, **options: Any) -> Iterator[tuple[DDP, NodeState]]:
    """A model under Tailbound, two ranks of which share a host, as torchrun says it."""
    ours = DDP(options.pop("net", None) or jobs.model())
    with register(ours, **jobs.on_hosts(rank, 2), **jobs.patient(**options)) as state:
        assert isinstance(state, NodeState)
        yield ours, state


def parity(rank: int, how: str) -> None:
    """Gradients against plain DDP's, and the same bits on all four ranks; collectives of a device come in one order.

    ``how``: buckets are those of the ``host``, or go the way of a ``device``, with Gloo in the place of NCCL. ``cuda``:
    they are on two devices, or on one that all share.
    """
    host, where, kinds = jobs.on_hosts(rank, 2), torch.device("cpu"), [torch.float32, torch.bfloat16]
    if how == "cuda":
        devices = torch.cuda.device_count()
        where = torch.device("cuda", rank % 2 % devices)
        torch.cuda.set_device(where)
        if devices < 2:  # NCCL takes one rank a device and host, but believes who says to be another host
            os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}
    elif how == "device":
        stream = Stream()
        stream.one_order = True
        node_state.stream_of = lambda _: stream
        base.Paths = functools.partial(Paths, host_form=PLAIN)
    else:
        kinds += [torch.float16, torch.float64]
    called: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*given: Any, **options: Any) -> Any:
            if given[0].dtype != torch.int64:  # what ranks tell each other at the end
                called.append(name)
            return call(*given, **options)

        return note

    dist.all_to_all_single = noted("exchange", dist.all_to_all_single)
    node_shards._all_gather = noted("gather", node_shards._all_gather)
    for dtype in kinds:
        options = {"bucket_cap_mb": 0.05, "gradient_as_bucket_view": how == "host"}
        plain, ours = (DDP(jobs.model().to(where, dtype), **options) for _ in range(2))
        with register(ours, **host, **jobs.PATIENT) as state:
            for step in range(3):
                del called[:]
                jobs.check_step(plain, ours, rank, step, dtype)
                half = len(called) // 2
                assert how == "host" or called == ["exchange"] * half + ["gather"] * half
                assert half > 1 or step == 0
            assert state.synchronize()
            stats = state.stats()
            assert (stats["ranks"], stats["delivered"], state.communicator.step) == (2, 1.0, 3)
            assert list(stats.get("device_codec", ())) == ([] if how == "host" else [str(where)])


def equal(rank: int) -> None:
    """Replicas that went astray are made equal: those of one host among each other, and those of different hosts."""
    with shared(rank, resync_period=16) as (ours, state):
        optimizer = torch.optim.Adam(ours.parameters(), 0.01)
        jobs.train(ours, optimizer, rank, range(4))
        assert jobs.same_everywhere(jobs.held(ours))
        state.boundary()
        with torch.no_grad():  # host 1 has lost something, and rank 1 something else than rank 0
            for p in ours.parameters():
                p.add_(float(rank > 0) + 0.5 * (rank == 1))
        if rank == 2:
            state.resync.unsound()
        assert not jobs.same_everywhere(jobs.held(ours))
        assert state.synchronize()
        assert jobs.same_everywhere(jobs.held(ours))
        moments = torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in ours.parameters()])
        assert jobs.same_everywhere(float(moments.sum()))

        # lost rows: what one rank of host 1 has missed, all of it have; a round makes the host equal again
        state.boundary()
        with torch.no_grad():
            for p in ours.parameters():
                p.add_(0.5 * (rank >= 2))
        missed = state.note_missing
        once = [1 if rank == 3 else 0]
        state.note_missing = lambda rows: missed(rows + (once.pop() if once else 0))
        steps = 0
        noticed = False
        until = time.monotonic() + 60
        while steps < 5 or (not jobs.same_everywhere(jobs.held(ours)) and time.monotonic() < until):
            jobs.train(ours, optimizer, rank, [4 + steps])
            state.boundary()
            steps += 1
            pairs = jobs.everywhere(jobs.held(ours))
            assert pairs[0] == pairs[1], steps
            assert pairs[2] == pairs[3], steps
            noticed |= rank == 2 and not state.resync.sound
        assert jobs.same_everywhere(jobs.held(ours))
        assert noticed == (rank == 2)
        assert ("replica" in state.stats()) == (rank in (0, 2))


def refusals(rank: int) -> None:
    """Everything that cannot be is said before a step, on every rank."""
    net = DDP(jobs.model())

    def refuses(words: str, node_group: str = "auto", net: DDP = net, **options: Any) -> None:
        jobs.refused(words, lambda: register(net, node_group=node_group, **jobs.patient(**options)))

    refuses("start with torchrun")
    refuses("node_group= is 'host'", "host")
    os.environ |= {"LOCAL_WORLD_SIZE": "3" if rank < 3 else "1", "LOCAL_RANK": str(rank) if rank < 3 else "0"}
    refuses("is one of 3 with a node_group there, and rank")
    jobs.on_hosts(rank, 2)
    pair = DDP(jobs.model(), process_group=[dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2])
    refuses("node_group takes those of all", net=pair)
    if rank < 3:
        refuses("rank 3 on ")
    else:  # a rank that wants no host, where others do: these name it, and it waits for them
        options = {**jobs.PATIENT, "timeout": 2.0}
        jobs.refused("did not", lambda: register(net, node_group="off", **options), TransportError)
    kept = len(dist.distributed_c10d._world.pg_map)
    alone = rank == 3  # a rank that alone makes a mistake is named on all ranks
    words = "2 ranks on a host are 2 jobs" if alone else "has refused: a switch serves one job"
    refuses(words, switch="10.0.0.9" if alone else None)
    refuses("node_group= is 'host'", "host" if alone else "auto")
    refuses("2 ranks on a host are 2 jobs", switch="10.0.0.9")
    refuses("interface=eth0,eth0: give another one", interface="eth0,eth0")
    refuses("deadline_ms begins with", deadline_ms=(1e9, 1e9))  # the host's groups are there by now
    assert len(dist.distributed_c10d._world.pg_map) == kept
    os.environ["TAILBOUND_NODE_GROUP"] = "auto"
    net = DDP(jobs.model())
    with register(net, **jobs.PATIENT) as state:
        assert isinstance(state, NodeState)
        jobs.refused("leave out tailbound.torch.batches", lambda: next(batches([1], state)))
        jobs.refused("leave out tailbound.torch.batches", state.catch_up)
        # a rank without any batch would wait in there
        jobs.refused("the ranks of a host make every forward pass together", net.join)
        assert len(dist.distributed_c10d._world.pg_map) == kept + 3
        for group in state._groups:
            assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == jobs.PATIENT["timeout"]
    assert "join_hook" not in vars(net)
    with state.hold():  # no rank is there to wait any more
        assert len(dist.distributed_c10d._world.pg_map) == kept


def holding(rank: int) -> None:
    """Rank 0 alone evaluates for longer than others wait: no job of its host loses anything by it."""
    with shared(rank, deadline_ms=(100.0, 100.0), patience=0.8) as (net, state):
        for step in range(4):
            net.zero_grad()
            if step == 3 and rank == 0:
                with state.hold():
                    time.sleep(1.5)  # what an evaluation takes
            before = state.stats()["counters"]
            jobs.backward(net, rank, step)
        after = state.stats()["counters"]
    expected, delivered, late = (
        after.get(name, 0) - before.get(name, 0) for name in ("rows_expected", "rows_delivered", "ops_late")
    )
    assert delivered == expected > 0
    assert late == 0


def held_at_a_boundary(rank: int) -> None:
    """Rank 0 alone holds, and then all meet, while its host is about to take a slice.

    It gave its host a slice before it held, while its neighbours sat in a barrier: now the next forward pass does.
    """
    with shared(rank, resync_period=16) as (ours, state):
        optimizer = torch.optim.SGD(ours.parameters(), 0.05)
        taken, hand_on = [], state._hand_on
        state._hand_on = lambda replica: (taken.append(state._within), hand_on(replica))[1]
        for step in range(4):
            jobs.train(ours, optimizer, rank, [step])
            if step == 2:
                state._takes = True  # as the host's first rank says where a slice is due
                if rank == 0:
                    with state.hold():
                        time.sleep(0.2)
                dist.barrier()  # a script has it, too: the others wait while rank 0 evaluates
        assert state.synchronize()
        assert jobs.same_everywhere(jobs.held(ours))
        assert taken[:1] == [0]


def one_host(rank: int) -> None:
    """One host needs no job: gradients are plain DDP's."""
    plain = DDP(jobs.model())
    with shared(rank) as (ours, state):
        for step in range(3):
            jobs.passes((plain, ours), rank, step)
            assert jobs.nmse(jobs.gradient(ours), jobs.gradient(plain)) < 1e-12
            assert jobs.same_everywhere(jobs.digest(jobs.gradient(ours)))
        assert state.synchronize()
        assert state.stats()["ranks"] == 1
        dist.destroy_process_group()  # before the job ends


def failing(rank: int, how: str) -> dict[str, Any]:
    """The job of rank 3 fails in step 2: its host ends there, in both ranks, and the other goes on.

    ``how``: in a bucket (``at once``), or before the forward pass (``lost``).
    """
    ours = DDP(jobs.model(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(ours.parameters(), 0.05)
    state = register(ours, optimizer=optimizer, **jobs.on_hosts(rank, 2), **HASTY)
    launch, buckets, steps, failure, again = state.communicator.launch, 0, 0, "", ""

    def fails(where: str) -> None:
        if rank == 3 and steps == 2 and how == where:
            raise TransportError("the job of rank 3 fails")

    def failing_launch(index: int, *values: Any, **options: Any) -> None:
        nonlocal buckets
        buckets = max(buckets, index + 1)
        if index == 1:
            fails("at once")
        launch(index, *values, **options)

    state.communicator.launch, Communicator.lost = failing_launch, property(lambda _: fails("lost"))
    for step in range(8):
        if failure := jobs.failed(ours, optimizer, rank, step):
            try:
                state.average(0, torch.zeros(64), True)
            except TransportError as next_time:
                again = str(next_time)
            break
        steps += 1
    state.close()
    return {"steps": steps, "buckets": buckets, "said": failure, "again": again, "held": jobs.held(ours)}

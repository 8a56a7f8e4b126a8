"""What the processes of the tests of several ranks a host do: hosts of two ranks each on one machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from hook_jobs import Words
from plain_form import PLAIN
from register_jobs import said
from scaler_jobs import Step, train
from tailbound.collective.communicator import Communicator
from tailbound.collective.op import Outcome
from tailbound.errors import TransportError
from tailbound.torch import GradScaler, batches, node_shards, node_state, register
from tailbound.torch import state as base
from tailbound.torch.node_state import NodeState
from tailbound.torch.paths import Paths
from tailbound.torch.streams import Stream
from torch_jobs import (
    BOUND,
    PATIENT,
    Messages,
    backward,
    batch,
    check_step,
    digest,
    ended_by_deadlines,
    gradient,
    model,
    nmse,
    patient,
    same_everywhere,
)

#: Ranks on a host.
HERE = 2
#: Where the job of a rank ends and the rank does not: the others wait for it in every op until they suspect it.
HASTY = patient(deadline_ms=(200.0, 200.0), patience="cloud")


def on_hosts(rank: int, here: int = HERE) -> None:
    """As torchrun says it, with ``here`` ranks on each host."""
    os.environ |= {"LOCAL_RANK": str(rank % here), "LOCAL_WORLD_SIZE": str(here)}


@contextlib.contextmanager
def shared(rank: int, **options: Any) -> Iterator[tuple[DDP, NodeState]]:
    """A model under Tailbound, with its host that torchrun names."""
    on_hosts(rank)
    ours = DDP(model())
    with register(ours, node_group="auto", **patient(**options)) as state:
        assert isinstance(state, NodeState)
        yield ours, state


def held(net: nn.Module) -> str:
    """Digest of parameters and buffers."""
    whole = torch.cat([value.detach().double().flatten() for value in (*net.parameters(), *net.buffers())])
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()


def parity(rank: int) -> list[dict[str, Any]]:
    """Gradients against plain DDP's: types, views, accumulation; bits equal on all four ranks."""
    on_hosts(rank)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        plain, ours = (DDP(model().to(dtype), bucket_cap_mb=0.05, gradient_as_bucket_view=True) for _ in range(2))
        with register(ours, node_group="auto", **PATIENT) as state:
            for step in range(4):
                check_step(plain, ours, rank, step, dtype)
            stats = state.stats()
            found.append({"ranks": stats["ranks"], "delivered": stats["delivered"], "steps": state.communicator.step})
    plain, ours = (DDP(model(), bucket_cap_mb=0.05) for _ in range(2))
    with register(ours, node_group="auto", **PATIENT) as state:
        for step in range(3):
            for net in (plain, ours):
                net.zero_grad()
                with net.no_sync():
                    backward(net, rank, 10 * step)
                backward(net, rank, 10 * step + 1)
            assert nmse(gradient(ours), gradient(plain)) <= 3 * BOUND
            assert same_everywhere(digest(ours))
    return found


def as_device(rank: int, cuda: bool = False) -> list[dict[str, Any]]:
    """Gradients against plain DDP's, with buckets that go the way of a device; in which order its collectives come.

    ``cuda``: on two of them, or on one that all share. Else on host memory, with Gloo in the place of NCCL.
    """
    on_hosts(rank)
    where = torch.device("cpu")
    if cuda:
        devices = torch.cuda.device_count()
        where = torch.device("cuda", rank % HERE % devices)
        if devices < HERE:  # NCCL takes one rank a device and host, but believes who says to be another host
            os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}
    called: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*given: Any, **options: Any) -> Any:
            if given[0].dtype != torch.int64:  # what ranks tell each other at the end
                called.append(name)
            return call(*given, **options)

        return note

    dist.all_to_all_single = noted("exchange", dist.all_to_all_single)
    node_shards._all_gather = noted("gather", node_shards._all_gather)
    if cuda:
        torch.cuda.set_device(where)
    else:
        inside = node_shards.Inside("gloo", Stream(), one_order=True)
        node_state.inside_of = lambda _: inside
        base.Paths = functools.partial(Paths, host_form=PLAIN)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        plain, ours = (DDP(model().to(where, dtype), bucket_cap_mb=0.05) for _ in range(2))
        with register(ours, node_group="auto", **PATIENT) as state:
            for step in range(3):
                del called[:]
                data, target = (values.to(where) for values in batch(rank, step, dtype))
                for net in (plain, ours):
                    net.zero_grad()
                    nn.functional.cross_entropy(net(data).float(), target).backward()
                assert nmse(gradient(ours), gradient(plain)) <= 3 * BOUND, step
                assert same_everywhere(hashlib.sha256(gradient(ours).cpu().numpy().tobytes()).hexdigest())
                half = len(called) // 2
                assert called == ["exchange"] * half + ["gather"] * half
                assert half > 1 or step == 0
            assert state.synchronize()
            stats = {name: state.stats()[name] for name in ("ranks", "delivered")}
            found.append(stats | {"on": list(state.stats()["device_codec"])})
    return found


def abstaining(rank: int) -> list[bool]:
    """NaN on one rank: what it is in is the mean of the other host, finite and the same bits on all ranks."""
    told = []
    with shared(rank) as (ours, state):
        for step, ill in enumerate([set(), {1}, set(), {0, 3}, set()]):
            ours.zero_grad()
            data, target = batch(rank, step)
            loss = nn.functional.cross_entropy(ours(data), target)
            (loss * (float("nan") if rank in ill else 1.0)).backward()
            value = gradient(ours)
            assert value.isfinite().all()
            assert same_everywhere(digest(ours))
            well = [host for host in range(2) if not ill & {2 * host, 2 * host + 1}]
            exact = torch.zeros_like(value)
            for other in (r for host in well for r in (2 * host, 2 * host + 1)):
                alone = model()
                backward(alone, other, step)
                exact += gradient(alone) / (2 * len(well))
            assert nmse(value, exact) <= 3 * BOUND if well else not value.any(), step
            told.append(state.last.abstained)
    return told


def scaled(rank: int, ill: list[Collection[int]]) -> list[Step]:
    """Trains with torch's own scaler, which ``register`` is not told of, while gradients of some ranks overflow."""
    on_hosts(rank)
    net = DDP(model(), bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    with register(net, optimizer=optimizer, node_group="auto", **patient(resync_period=0)) as state:
        steps = train(net, state, optimizer, scaler, rank, ill)
        assert type(scaler) is GradScaler
    return steps


def sparse(rank: int) -> None:
    """Sparse buckets, the last of a step or the first, are averaged exactly, over the ranks of all hosts."""
    on_hosts(rank)
    for first in (False, True):
        plain, ours = DDP(Words(first=first)), DDP(Words(first=first))
        with register(ours, node_group="auto", **PATIENT) as state:
            for step in range(3):
                words = torch.randint(0, 50, (6, 4), generator=torch.Generator().manual_seed(10 * step + rank))
                for net in (plain, ours):
                    net.zero_grad()
                    net(words).square().sum().backward()
                values = [net.module.words.weight.grad.to_dense() for net in (ours, plain)]
                torch.testing.assert_close(*values)
                heads = [net.module.head.weight.grad for net in (ours, plain)]
                assert nmse(*heads) <= 3 * BOUND, (first, step)
            assert state.communicator.step == 3


def equal(rank: int) -> dict[str, Any]:
    """Replicas that went astray are made equal: those of one host among each other, and those of different hosts."""
    with shared(rank, resync_period=16) as (ours, state):
        optimizer = torch.optim.Adam(ours.parameters(), 0.01)
        for step in range(4):
            optimizer.zero_grad()
            backward(ours, rank, step)
            optimizer.step()
        trained = same_everywhere(held(ours))
        state.boundary()
        with torch.no_grad():  # host 1 has lost something, and rank 1 something else than rank 0
            for p in ours.parameters():
                p.add_(float(rank > 0) + 0.5 * (rank == 1))
        if rank == 2:
            state.resync.unsound()
        astray = not same_everywhere(held(ours))
        well = state.synchronize()
        synchronized = same_everywhere(held(ours))
        moments = torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in ours.parameters()])
        assert same_everywhere(float(moments.sum()))

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
        while steps < 5 or (not same_everywhere(held(ours)) and time.monotonic() < until):
            optimizer.zero_grad()
            backward(ours, rank, 4 + steps)
            optimizer.step()
            state.boundary()
            steps += 1
            pairs = [None] * 4
            dist.all_gather_object(pairs, held(ours))
            assert pairs[0] == pairs[1], steps
            assert pairs[2] == pairs[3], steps
            noticed |= rank == 2 and not state.resync.sound
        return {
            "trained, astray, synchronized": (trained, astray, synchronized),
            "said": well,
            "repaired": same_everywhere(held(ours)),
            "noticed": noticed,
            "replica": "replica" in state.stats(),
        }


def refusals(rank: int) -> None:
    """Everything that cannot be is said before a step, on every rank."""
    net = DDP(model())

    def refused(words: str, **options: Any) -> None:
        text = said(lambda: register(net, **patient(**options)))
        assert words in text, text

    refused("start with torchrun", node_group="auto")
    refused("node_group= is 'host'", node_group="host")
    on_hosts(rank)
    os.environ |= {"LOCAL_WORLD_SIZE": "3" if rank < 3 else "1", "LOCAL_RANK": str(rank) if rank < 3 else "0"}
    refused("is one of 3 with a node_group there, and rank", node_group="auto")
    on_hosts(rank)
    pair = DDP(model(), process_group=[dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2])
    assert "node_group takes those of all" in said(lambda: register(pair, **patient(node_group="auto")))
    refused("rank 3 on ", node_group="off" if rank == 3 else "auto") if rank < 3 else said_late(net)
    kept = len(dist.distributed_c10d._world.pg_map)
    alone = rank == 3  # who is alone in a mistake is named on all ranks
    words = "2 ranks on a host are 2 jobs" if alone else "has refused: a switch serves one job"
    refused(words, node_group="auto", datapath="switch" if alone else "udp")
    refused("node_group= is 'host'", node_group="host" if alone else "auto")
    refused("2 ranks on a host are 2 jobs", node_group="auto", datapath="switch")
    refused("interface=eth0,eth0: give another one", node_group="auto", interface="eth0,eth0")
    refused("deadline_ms begins with", node_group="auto", deadline_ms=(1e9, 1e9))  # the host's groups are there by now
    assert len(dist.distributed_c10d._world.pg_map) == kept
    os.environ["TAILBOUND_NODE_GROUP"] = "auto"
    net = DDP(model())
    with register(net, **PATIENT) as state:
        assert isinstance(state, NodeState)
        assert "leave out tailbound.torch.batches" in said(lambda: next(batches([1], state)))
        assert "leave out tailbound.torch.batches" in said(state.catch_up)
        refusal = said(net.join)  # a rank without any batch would wait in there
        assert refusal.startswith("the ranks of a host make every forward pass together"), refusal
        assert len(dist.distributed_c10d._world.pg_map) == kept + 3
        for group in state._groups:
            assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == PATIENT["timeout"]
    assert "join_hook" not in vars(net)
    with state.hold():  # no rank is there to wait any more
        assert len(dist.distributed_c10d._world.pg_map) == kept


def said_late(net: DDP) -> None:
    """A rank that wants no host, where others do: these name it, and it waits for them."""
    with pytest.raises(TransportError, match="did not"):
        register(net, **{**PATIENT, "timeout": 2.0}, node_group="off")


def holding(rank: int) -> dict[str, Any]:
    """Rank 0 alone evaluates for longer than others wait: no job of its host loses anything by it."""
    on_hosts(rank)
    net = DDP(model())
    options = patient(deadline_ms=(100.0, 100.0), patience=0.8)
    with register(net, node_group="auto", **options) as state:
        for step in range(4):
            net.zero_grad()
            if step == 3 and rank == 0:
                with state.hold():
                    time.sleep(1.5)  # what an evaluation takes
            before = state.stats()["counters"]
            backward(net, rank, step)
        after = state.stats()["counters"]
    return {name: after.get(name, 0) - before.get(name, 0) for name in ("rows_expected", "rows_delivered", "ops_late")}


def held_at_a_boundary(rank: int) -> dict[str, Any]:
    """Rank 0 alone holds, and then all meet, while its host is about to take a slice."""
    with shared(rank, resync_period=16) as (ours, state):
        optimizer = torch.optim.SGD(ours.parameters(), 0.05)
        taken, hand_on = [], state._hand_on
        state._hand_on = lambda replica: (taken.append(state._within), hand_on(replica))[1]
        for step in range(4):
            optimizer.zero_grad()
            backward(ours, rank, step)
            optimizer.step()
            if step == 2:
                state._takes = True  # as the host's first rank says where a slice is due
                if rank == 0:
                    with state.hold():
                        time.sleep(0.2)
                dist.barrier()  # a script has it, too: the others wait while rank 0 evaluates
        equal = state.synchronize()
        return {"taken": taken, "equal": equal and same_everywhere(held(ours))}


def one_host(rank: int) -> dict[str, Any]:
    """One host: there is nobody to exchange with, and gradients are plain DDP's."""
    on_hosts(rank)
    plain, ours = DDP(model()), DDP(model())
    with register(ours, node_group="auto", **PATIENT) as state:
        for step in range(3):
            for net in (plain, ours):
                net.zero_grad()
                backward(net, rank, step)
            assert nmse(gradient(ours), gradient(plain)) < 1e-12
            assert same_everywhere(digest(ours))
        assert state.synchronize()
        return state.stats()


def failed(net: DDP, optimizer: torch.optim.Optimizer, rank: int, step: int) -> str:
    """Trains a step; what it ends with, in the bucket's future or by the hook, or nothing."""
    try:
        optimizer.zero_grad()
        backward(net, rank, step)
        optimizer.step()
    except (RuntimeError, TransportError) as error:
        return str(error)
    return ""


def failing(rank: int, how: str) -> dict[str, Any]:
    """The job of rank 3 fails in step 2: its host ends there, in both ranks, and the other goes on.

    ``how``: in a bucket ``at once``, or when this is averaged (``late``), or before the forward pass (``lost``).
    """
    on_hosts(rank)
    ours = DDP(model(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(ours.parameters(), 0.05)
    state = register(ours, optimizer=optimizer, node_group="auto", **HASTY)
    launch, buckets, steps, failure, again = state.communicator.launch, 0, 0, "", ""

    def failing_launch(index: int, *values: Any, done: Callable[[Outcome], None], **options: Any) -> None:
        nonlocal buckets
        buckets = max(buckets, index + 1)
        if rank == 3 and steps == 2 and index == 1 and how != "lost":
            error = TransportError("the job of rank 3 fails")
            if how == "at once":
                raise error
            told, done = done, lambda outcome: told(dataclasses.replace(outcome, error=error))
        launch(index, *values, done=done, **options)

    def is_lost(_: object) -> bool:
        if rank == 3 and steps == 2 and how == "lost":
            raise TransportError("the job of rank 3 fails")
        return False

    state.communicator.launch, Communicator.lost = failing_launch, property(is_lost)
    for step in range(8):
        if failure := failed(ours, optimizer, rank, step):
            try:
                state.average(0, torch.zeros(64), True)
            except TransportError as next_time:
                again = str(next_time)
            break
        steps += 1
    state.close()
    return {"steps": steps, "buckets": buckets, "said": failure, "again": again, "held": held(ours)}


def killed(rank: int, ready: Any, die: Any) -> dict[str, Any]:
    """Rank 3 dies between two steps: rank 2, on its host, ends with an error; the other host goes on.

    ``ended``: by step, how many halves of ops deadlines have ended so far. A step is one op in each job.
    """
    on_hosts(rank)
    messages = Messages()
    logging.getLogger("tailbound").addHandler(messages)
    ours = DDP(model())
    optimizer = torch.optim.SGD(ours.parameters(), 0.05)
    state = register(ours, optimizer=optimizer, node_group="auto", **PATIENT)
    ended, failure = [], ""
    for step in range(16):
        if step == 4:
            if rank == 3:
                ready.set()
                die.wait()  # never set: SIGKILL comes here
            ready.wait()
        if failure := failed(ours, optimizer, rank, step):
            break
        ended.append(ended_by_deadlines(state))
    state.close()
    return {"ended": ended, "said": failure, "texts": messages.texts, "held": held(ours)}

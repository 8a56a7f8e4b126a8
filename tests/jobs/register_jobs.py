"""What the processes of the tests of ``register`` do: collectives of models and optimizers, and what is left behind."""

from __future__ import annotations

import gc
import logging
import threading
import time
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tailbound.torch import GradScaler, batches, register
from tailbound.torch.register import _SYNC_OPTION
from torch_jobs import PATIENT, Messages, backward, digest, model, passes, refused, training


def ours() -> set[str]:
    """Threads of this package that run in this process."""
    return {t.name for t in threading.enumerate() if t.name.startswith("tailbound")}


def rings(rank: int) -> None:
    """The ring holds two steps of the model unless a size was given, and the log says what that takes and allows."""
    messages = Messages()
    logging.getLogger("tailbound").addHandler(messages)
    logging.getLogger("tailbound").setLevel(logging.INFO)
    patient = {name: value for name, value in PATIENT.items() if name != "ring_mib"}
    for options, rows, mib, steps, allows in (({}, 65536, 176, 3.8, 2), ({"ring_mib": 8.0}, 4096, 11, 0.2, 0)):
        words = f"take {mib} MiB of memory and hold {steps} steps of this model (24.0 M parameters): "
        words += f"a rank that misses at most {allows} applies"
        net = DDP(nn.Linear(4900, 4900, bias=False))
        with register(net, **patient, **options) as state:
            assert state.communicator is not None
            assert state.communicator.job.store.result_rows == rows
        assert any(words in text for text in messages.texts), messages.texts


def refusals(rank: int) -> None:
    """What cannot be is refused by name, and leaves no job behind: the model can be registered again."""
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer  # warns, which tests refuse

    def refuses(words: str, net: DDP, *given: Any) -> str:
        text = refused(words, lambda: register(net, *given, **PATIENT))
        assert not ours(), ours()
        return text

    many = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(1100)))
    # more than a step can number
    assert "bucket_cap_mb=1 or more" in refuses("about 1145 buckets of 0 MiB", DDP(many, bucket_cap_mb=0.015))
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["1.weight", "1.bias", "2.running_mean"])
    refuses("2 trained parameter(s) (1.bias, 1.weight)", DDP(net, **{_SYNC_OPTION: False}))
    net[1].requires_grad_(False)  # as buffers are: nobody's business
    register(DDP(net, **{_SYNC_OPTION: False}), **PATIENT).close()
    net = DDP(model())
    for words, optimizer in (
        ("give register the one that does", torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)),
        ("give it max_iter=1", torch.optim.LBFGS(net.parameters())),
        ("tailbound.torch.fsdp", ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)),
        ("give the optimizer inside it", PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), 0.1), None)),
    ):
        refuses(words, net, optimizer)
    with register(net, **PATIENT) as state:
        backward(net, rank, 0)
        assert state.last.error is None


def collectives(rank: int) -> None:
    """Who waits for all ranks in every pass is warned of; where ranks could skip steps, it is refused instead."""
    plain = {_SYNC_OPTION: False}
    for net, options, words in (
        (nn.Sequential(nn.Linear(4, 4), nn.Identity()), plain, "SyncBatchNorm"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), {}, f"{_SYNC_OPTION}=False"),
        (nn.Linear(4, 4), {"find_unused_parameters": True}, "find_unused_parameters=False"),
    ):
        wrapped = DDP(net, **options)
        if words == "SyncBatchNorm":
            wrapped.module[1] = nn.SyncBatchNorm(4)  # DDP itself takes it on GPUs only
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = register(wrapped, **PATIENT)
        texts = [str(w.message) for w in caught if w.filename == __file__]
        assert any(words in text for text in texts), texts
        with state:
            refusal = refused("no rank can skip a step alone", lambda state=state: next(batches([1], state)))
            assert refused(words, state.catch_up) == refusal
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = register(DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), **plain), **PATIENT)
    with state:
        assert list(batches([1], state)) == [1]


def optimizers(rank: int) -> None:
    """An optimizer whose ``step`` is a collective, and that ``register`` was not given, is refused before it steps."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = DDP(model())
    sharded = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with register(net, **PATIENT):
        backward(net, rank, 0)
        before = digest(net.state_dict())
        refused("ZeroRedundancyOptimizer shards", sharded.step)
    assert digest(net.state_dict()) == before
    sharded.step()
    sharded.consolidate_state_dict()
    whole = [sharded.state_dict()] if rank == 0 else [None]
    dist.broadcast_object_list(whole)
    sharded.load_state_dict(whole[0])
    # a job that goes on has another number of states on each rank, and was told to load its checkpoint on all
    refused("ZeroRedundancyOptimizer shards", lambda: register(DDP(net.module), sharded, **PATIENT))


def dropped(rank: int) -> None:
    """A job ends, and lets go of model and optimizer, when nobody has its model or its state any more."""
    net = DDP(model())
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    state = register(net, optimizer=optimizer, **PATIENT)
    scaler = GradScaler(state, init_scale=2.0)
    for step in range(2):
        passes([net], rank, step)
        scaler.step(optimizer)
        scaler.update()
    left = [weakref.ref(net.module), weakref.ref(optimizer), weakref.ref(state)]
    del net, scaler
    gc.collect()
    assert ours()
    assert state.synchronize()  # its state may still be asked
    del optimizer, state
    until = time.monotonic() + 20
    while (ours() or any(ref() for ref in left)) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
    assert not ours(), ours()
    assert not any(ref() for ref in left)


def compiled_step(rank: int) -> None:
    """The compiler does not look into the hook before ``optimizer.step``, where that is compiled."""
    seen: list[bool] = []
    with training(torch.optim.SGD, 0.1, **PATIENT) as (net, optimizer, state):
        assert state.resync is not None
        adopt, step = state.resync.replica.adopt, torch.compile(optimizer.step, backend="eager")
        state.resync.replica.adopt = lambda one: (seen.append(torch.compiler.is_compiling()), adopt(one))[1]
        for number in range(2):
            passes([net], rank, number)
            step()
    assert seen == [False, False]

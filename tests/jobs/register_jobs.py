"""What the processes of the tests of ``register`` do: collectives of models and optimizers, and what is left behind."""

from __future__ import annotations

import gc
import logging
import threading
import time
import warnings
import weakref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tailbound.torch import GradScaler, batches, register
from tailbound.torch.register import _SYNC_OPTION
from torch_jobs import PATIENT, Messages, backward, model, refused, training


def ours() -> set[str]:
    """Threads of this package that run in this process."""
    return {t.name for t in threading.enumerate() if t.name.startswith("tailbound")}


def rings(rank: int) -> None:
    """The ring holds two steps of the model unless a size was given, and the log says what that takes and allows."""
    messages = Messages()
    logging.getLogger("tailbound").addHandler(messages)
    logging.getLogger("tailbound").setLevel(logging.INFO)
    patient = {name: value for name, value in PATIENT.items() if name != "ring_mib"}
    for options, rows, mib, steps, allows in (
        ({}, 65536, 176, 3.8, 2),
        ({"ring_mib": 8.0}, 4096, 11, 0.2, 0),
    ):
        words = f"take {mib} MiB of memory and hold {steps} steps of this model (24.0 M parameters): "
        words += f"a rank that misses at most {allows} applies"
        net = DDP(nn.Linear(4900, 4900, bias=False))
        with register(net, **patient, **options) as state:
            assert state.communicator is not None
            assert state.communicator.job.store.result_rows == rows
        assert any(words in text for text in messages.texts), messages.texts


def many_buckets(rank: int) -> None:
    """More buckets than a step can number are refused before the first step, with a size that will do."""
    net = DDP(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(1100))), bucket_cap_mb=0.015)
    refusal = refused("about 1145 buckets of 0 MiB", lambda: register(net, **PATIENT))
    assert "bucket_cap_mb=1 or more" in refusal
    assert not ours(), ours()


def ignored(rank: int) -> None:
    """Trained parameters that DDP ignores are refused by name, frozen ones and buffers are not."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["1.weight", "1.bias", "2.running_mean"])
    refused("2 trained parameter(s) (1.bias, 1.weight)", lambda: register(DDP(net, **{_SYNC_OPTION: False}), **PATIENT))
    assert not ours(), ours()
    net[1].requires_grad_(False)
    with register(DDP(net, **{_SYNC_OPTION: False}), **PATIENT):
        pass


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
    """An optimizer whose ``step`` is a collective: refused where it is given, and before the first step where not."""
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    net = DDP(model())
    sharded = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    several = torch.optim.LBFGS(net.parameters())
    refused("give it max_iter=1", lambda: register(net, optimizer=several, **PATIENT))
    local = PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), 0.1), None)
    refused("tailbound.torch.fsdp", lambda: register(net, optimizer=sharded, **PATIENT))
    refused("give the optimizer inside it", lambda: register(net, optimizer=local, **PATIENT))
    assert not ours(), ours()
    before = [p.detach().clone() for p in net.parameters()]
    with register(net, **PATIENT):
        backward(net, rank, 0)
        refused("ZeroRedundancyOptimizer shards", sharded.step)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def refused_late(rank: int) -> None:
    """What is refused once the job is up leaves no job behind, and the model can be registered again."""
    net = DDP(model())
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    refused("give register the one that does", lambda: register(net, optimizer=other, **PATIENT))
    assert not ours(), ours()
    with register(net, **PATIENT) as state:
        backward(net, rank, 0)
        assert state.last.error is None


def dropped(rank: int) -> None:
    """A job ends, and lets go of model and optimizer, when nobody has its model or its state any more."""
    net = DDP(model())
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    state = register(net, optimizer=optimizer, **PATIENT)
    scaler = GradScaler(state, init_scale=2.0)
    for step in range(2):
        optimizer.zero_grad()
        backward(net, rank, step)
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
        adopt = state.resync.replica.adopt

        def watched(stepped: torch.optim.Optimizer) -> bool:
            seen.append(torch.compiler.is_compiling())
            return adopt(stepped)

        state.resync.replica.adopt = watched  # type: ignore[method-assign]
        step = torch.compile(optimizer.step, backend="eager")
        for number in range(2):
            optimizer.zero_grad()
            backward(net, rank, number)
            step()
    assert seen == [False, False]

"""What DDP hooks need of PyTorch that it does not promise, in one place.

``tests/unit/test_compat.py`` names each of these, so that a version without it says so. Subclasses of PyTorch's own
classes override more (``scaler``, ``elastic``).
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket as GradBucket  # the same object as torch.distributed.GradBucket
from torch._C._distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel

from tailbound.errors import ConfigError

#: Classes of scalers that differ in their arguments only.
SCALERS = (torch.amp.GradScaler, torch.cuda.amp.grad_scaler.GradScaler, torch.cpu.amp.grad_scaler.GradScaler)
_STEP = torch.amp.GradScaler.step.__code__


def default_store() -> Store:
    """That of the default process group."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def default_group() -> dist.ProcessGroup:
    """As ``dist.group.WORLD``, if there is one."""
    group: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
    return group


def backward_pass() -> int:
    """Torch's number of the backward pass that the calling thread is within; below zero: of none."""
    return torch._C._current_graph_task_id()


def call_after_backward(call: Callable[[], None]) -> None:
    """Has ``call`` made at the end of the backward pass under way, as FSDP does; torch forgets it where that raises."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def joined(ddp_model: torch.nn.Module | None) -> bool:
    """Whether a forward pass of ``ddp_model`` is within DDP's ``join()``."""
    return bool(getattr(getattr(ddp_model, "_join_config", None), "enable", False))


class RefusedJoin:
    """DDP's ``join()`` of ``ddp_model`` raises a ``ConfigError`` that says ``why``, until this is removed."""

    def __init__(self, ddp_model: torch.nn.Module, why: str) -> None:
        self._model = weakref.ref(ddp_model)
        ddp_model.join_hook = partial(_refuse, why)  # type: ignore[assignment]

    def remove(self) -> None:
        """Lets the model be joined again."""
        if (found := self._model()) is not None:
            vars(found).pop("join_hook", None)


def _refuse(why: str, **_: object) -> NoReturn:
    raise ConfigError(why)


def used_by(ddp_model: torch.nn.Module) -> Callable[[], torch.Tensor | None]:
    """Asks DDP how many ranks use each of its parameters, and does not keep it; None: there is no such model."""
    held = weakref.ref(ddp_model)

    def used() -> torch.Tensor | None:
        found = held()
        return found.reducer._get_local_used_map() if isinstance(found, DistributedDataParallel) else None

    return used


def keep_connections(ddp_model: DistributedDataParallel) -> None:
    """Keeps the model's Gloo connections until its reducer is gone, and at exit without end.

    A reducer that holds them last destroys them with the GIL held. Gloo's destructor then joins its threads, which may
    wait for the GIL: the process hangs. A reference from Python releases the GIL first.
    """
    try:
        connections = ddp_model.process_group._get_backend(torch.device("cpu"))
    except RuntimeError:  # none for tensors on the CPU
        return
    for holder in (ddp_model.reducer, ddp_model.logger):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connections))  # which exit does not drop, as it does finalizers
        release = weakref.finalize(holder, ctypes.pythonapi.Py_DecRef, ctypes.py_object(connections))
        release.atexit = False


def buffers_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Persistent buffers of ``module`` itself, by name; one may be None, and have data later."""
    for name, buffer in module._buffers.items():
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def scaler_at_work() -> torch.amp.GradScaler | None:
    """The scaler whose ``step`` the calling thread is in: it says itself to no hook of the optimizer."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _STEP:
        frame = frame.f_back  # type: ignore[assignment]
    found: torch.amp.GradScaler | None = None if frame is None else frame.f_locals["self"]
    return found

"""Where all-reduces may be bounded, ``with bounded():`` and ``with exact():``, and where a step of them ends."""

from __future__ import annotations

from types import TracebackType

import torch
import torch.distributed as dist

from tailbound.errors import ConfigError
from tailbound.torch.backend import TailboundProcessGroup


class _Mode:
    """Sets ``bounded_now`` of a group for as long as the context lasts, for all threads: backward has its own."""

    def __init__(self, group: dist.ProcessGroup | None, on: bool) -> None:
        self._group, self._on = _ours(group), on
        self._before: list[bool] = []

    @torch.compiler.disable
    def __enter__(self) -> None:
        self._before.append(self._group.bounded_now)
        self._group.bounded_now = self._on

    @torch.compiler.disable
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group.bounded_now = self._before.pop()


@torch.compiler.disable
def bounded(group: dist.ProcessGroup | None = None) -> _Mode:
    """Within the context, sums and averages of floating-point tensors over ``group`` take bounded time, and are lossy.

    ``with bounded(): loss.backward()`` and then ``end_step()`` do so for DDP without a hook. The context counts when an
    all-reduce is called, on all threads of this process, and must be the same on all ranks. All else stays exact:
    other operations, integers, other collectives.

    Args:
        group: a group of the backend ``tailbound``; default: the default group.

    Raises:
        ConfigError: it is a group of another backend.
    """
    return _Mode(group, True)


@torch.compiler.disable
def exact(group: dist.ProcessGroup | None = None) -> _Mode:
    """Within the context, all-reduces over ``group`` are exact again (a loss, a metric); otherwise as ``bounded``."""
    return _Mode(group, False)


@torch.compiler.disable
def end_step(group: dist.ProcessGroup | None = None) -> None:
    """Says that a step of training is over: all of its bounded all-reduces over ``group`` have been called.

    The transport learns deadlines from steps that are alike. Call it on all ranks at the same place after every step;
    it waits for nothing. All-reduces that no call ends are one step, which raises once it has too many ops.

    Args:
        group: a group of the backend ``tailbound``; default: the default group.

    Raises:
        ConfigError: it is a group of another backend.
        TransportError: it has been shut down.
    """
    _ours(group).end_step()


def _ours(group: dist.ProcessGroup | None) -> TailboundProcessGroup:
    found = group if group is not None else dist.group.WORLD
    if isinstance(found, TailboundProcessGroup):
        return found
    if found is None or not isinstance(found, dist.ProcessGroup):
        raise ConfigError('no process group here: call torch.distributed.init_process_group("tailbound") first')
    raise ConfigError(
        f"this process group has the backend {dist.get_backend(found)!r}: only one of the backend 'tailbound' can be "
        'bounded; call torch.distributed.init_process_group("tailbound"), or new_group(..., backend="tailbound")'
    )

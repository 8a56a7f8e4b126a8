"""Training of one model by a trainer: what the callbacks of all trainers have in common.

A trainer has collectives of its own: a gather for each log line, barriers around a checkpoint. No hook can bound these.
A rank holds from before such a place until the next batch, so that it leaves no rank out while it waits there.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tailbound.torch
from tailbound.errors import ConfigError
from tailbound.torch.compat import default_group
from tailbound.torch.elastic import is_elastic
from tailbound.torch.kept import Stateful

log = logging.getLogger("tailbound")

#: Seconds in which replicas are made equal. A rank that does not come, since it is stopped, is waited for half as long.
EQUAL_WITHIN = 120.0


class Training:
    """Of the model that a trainer trains.

    Args:
        trainer: its name, for messages.
        options: of ``tailbound.torch.register``.

    Attributes:
        state: of the model, once training has begun; it keeps its ``stats()`` when training has ended.

    Raises:
        ConfigError: the job is elastic.
    """

    def __init__(self, trainer: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._trainer, self._options = trainer, options
        self.state: tailbound.torch.TailboundState | None = None
        self._paused: AbstractContextManager[None] | None = None
        self._equal = self._over = False
        if dist.is_initialized() and is_elastic(default_group()):
            raise ConfigError(
                f"{trainer} calls all_gather, all_reduce, broadcast and barrier, which a job whose ranks may come back "
                "does not have: use torch.distributed.init_process_group in place of tailbound.torch.elastic, or write "
                "the loop yourself, as examples/train_elastic.py does"
            )

    def has_set(self, what: str) -> None:
        """Logs what has been set, so that steps take bounded time."""
        log.info("for steps in bounded time, %s: %s", self._trainer, what)

    def warn(self, what: str) -> None:
        """Of what still waits for all ranks in a step, and what to do."""
        warnings.warn(f"in {self._trainer} a slow rank still holds all others: {what}", UserWarning, stacklevel=3)

    def begin(
        self, model: object, optimizer: Any, scaler: Any, schedulers: Mapping[str, Stateful], remedy: str, buffers: bool
    ) -> tailbound.torch.TailboundState:
        """Registers ``model``, which may be compiled.

        Args:
            model, optimizer, scaler, schedulers: what the trainer trains with.
            remedy: how the trainer takes DDP.
            buffers: the user has said whether DDP broadcasts buffers.

        Raises:
            ConfigError: ``model`` is not a DDP model; see also ``tailbound.torch.register``.
        """
        if self.state is not None:  # training that ended by an exception, and is tried again
            self.state.close()
        ddp = getattr(model, "_orig_mod", model)
        if not isinstance(ddp, DistributedDataParallel):
            raise ConfigError(
                f"{self._trainer} trains a {type(ddp).__name__}, and Tailbound averages the gradients of a "
                f"DistributedDataParallel model: {remedy}"
            )
        if ddp.broadcast_buffers and not buffers:
            ddp.broadcast_buffers = False
            self.has_set("DDP broadcasts no buffers")
        self._paused, self._over = None, False
        extra_state = schedulers or None
        self.state = tailbound.torch.register(ddp, optimizer, scaler=scaler, extra_state=extra_state, **self._options)
        return self.state

    def pause(self, *, equal: bool = False) -> None:
        """This rank holds until ``resume``; ``equal``: the replicas are made equal, too, or it warns."""
        if self.state is None or self._over or self.state.detached:
            return
        if self._paused is None:
            hold = self.state.hold()
            hold.__enter__()
            self._paused, self._equal = hold, False
        if equal and not self._equal:
            self._equal = self.state.synchronize(EQUAL_WITHIN)
            if not self._equal:
                log.warning(
                    "rank %d: what %s evaluates or saves now may differ between ranks: see above which did not come, "
                    "and resume from an earlier checkpoint, or from this one on all ranks",
                    self.state.rank,
                    self._trainer,
                )

    def held(self, method: Callable[..., Any], *, equal: bool = False) -> Callable[..., Any]:
        """``method`` of the trainer, which waits for all ranks, within a pause."""

        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            outer = self._paused
            self.pause(equal=equal)
            try:
                return method(*arguments, **named)
            finally:
                if outer is None:
                    self.resume()

        return call

    def resume(self) -> None:
        """Training goes on."""
        if self._paused is not None:
            self._paused.__exit__(None, None, None)
            self._paused = None

    def end(self) -> None:
        """Training is over: the replicas are made equal, and the job ends. Nothing pauses after it."""
        if self.state is not None and not self._over:
            self.pause(equal=True)
            self.resume()
            self.state.close()
            self._over = True

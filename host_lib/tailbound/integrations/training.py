"""Training of one model by a trainer: what the callbacks of all trainers have in common.

A trainer has collectives of its own: a gather for each log line, barriers around a checkpoint. No hook can bound these.
A rank holds from before such a place until the next batch, so that it leaves no rank out while it waits there.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tailbound.torch
from tailbound.errors import ConfigError
from tailbound.torch.compat import default_group
from tailbound.torch.elastic import is_elastic
from tailbound.torch.kept import Stateful
from tailbound.torch.state import TailboundState

log = logging.getLogger("tailbound")


class Training:
    """Of the model that a trainer trains.

    Args:
        trainer: its name, for messages.
        collectives: those that it calls.
        options: of ``tailbound.torch.register``.

    Attributes:
        state: of the model since ``begin``, also once training is over.
        buffers_open: the user has not said whether DDP broadcasts buffers.
        done: what has been set for bounded time, until ``report``.
        left: what still waits for all ranks, and what to do.

    Raises:
        ConfigError: the job is elastic.
    """

    def __init__(self, trainer: str, collectives: str, options: Mapping[str, Any]) -> None:
        self._trainer, self._collectives, self._options = trainer, collectives, options
        self.state: TailboundState | None = None
        self.buffers_open = True
        self.done: list[str] = []
        self.left: list[str] = []
        self._paused: ExitStack | None = None
        self._equal = False
        self._refuse_elastic()

    def _refuse_elastic(self) -> None:
        if dist.is_available() and dist.is_initialized() and is_elastic(default_group()):
            raise ConfigError(
                f"{self._trainer} calls {self._collectives}, which a job whose ranks may come back does not have: use "
                "torch.distributed.init_process_group in place of tailbound.torch.elastic, or write the loop yourself, "
                "as examples/train_elastic.py does"
            )

    def begin(
        self, model: object, optimizer: Any, scaler: Any, schedulers: Mapping[str, Stateful], remedy: str
    ) -> TailboundState:
        """Registers ``model``, which may be compiled; ``remedy`` says how the trainer takes DDP.

        Raises:
            ConfigError: ``model`` is not a DDP model; see also ``tailbound.torch.register``.
        """
        if self.state is not None:  # training that ended by an exception, and is tried again
            self.state.close()
        self._refuse_elastic()
        ddp = unwrapped(model)
        if not isinstance(ddp, DistributedDataParallel):
            raise ConfigError(
                f"{self._trainer} trains a {type(ddp).__name__}, and Tailbound averages the gradients of a "
                f"DistributedDataParallel model: {remedy}"
            )
        if self.buffers_open and ddp.broadcast_buffers:
            ddp.broadcast_buffers = False
            self.done.append("DDP broadcasts no buffers")
        self._paused = None
        self.state = tailbound.torch.register(
            ddp, optimizer, scaler=scaler, extra_state=schedulers or None, **self._options
        )
        return self.state

    def report(self) -> None:
        """Logs what has been set, and warns once of what is left."""
        if self.done:
            log.info("for steps in bounded time, %s: %s", self._trainer, "; ".join(self.done))
        if self.left:
            text = f"in {self._trainer} a slow rank still holds all others: " + "; ".join(self.left)
            warnings.warn(text, UserWarning, stacklevel=3)
        self.done, self.left = [], []

    def pause(self, *, equal: bool = False) -> None:
        """This rank holds until ``resume``; ``equal``: the replicas are made equal, too."""
        if self.state is None:
            return
        if self._paused is None:
            self._paused, self._equal = ExitStack(), False
            self._paused.enter_context(self.state.hold())
        if equal and not self._equal:
            self._equal = self.state.synchronize()

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
            self._paused.close()
            self._paused = None

    def end(self) -> None:
        """Training is over: the replicas are made equal, and the job ends."""
        if self.state is not None:
            self.pause(equal=True)
            self.resume()
            self.state.close()


def unwrapped(model: object) -> object:
    """``model`` without the wrapper of ``torch.compile``."""
    return getattr(model, "_orig_mod", model)

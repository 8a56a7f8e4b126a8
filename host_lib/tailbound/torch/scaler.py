"""A gradient scaler whose loss scale is that of all ranks (clock-25).

``torch.amp.GradScaler`` looks for Inf and NaN in the gradients that it is given. Under Tailbound these are finite: a
rank whose own gradient is not stays out of the average. So a rank with an overflow would never back off, and ranks
could disagree. Here

- gradients are divided by the loss scale before they are coded and multiplied by it again after, in float32: on the
  wire they have no scale, ranks whose scales differ for a step still average the same quantity, and the codec's own
  scales do not jump with it;
- a rank that overflows writes the next epoch (``loss_scale``) and tells the others over the reliable path; all take it
  at the end of their step;
- a step is applied where some ranks did not overflow; it is skipped by all where all did, in any bucket;
- the ranks of a host that share buckets (``node_group``) add up what they have scaled, so they need one scale at any
  time: at the end of a step they tell each other of overflows and of the highest epoch that each has heard of.

torch's own scaler is therefore never left to itself: one that steps the model (in Lightning or Accelerate, say) becomes
one of these, by ``register(scaler=...)`` or when it is found at work in the first step.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError, TransportError
from tailbound.torch.loss_scale import Epoch, LossScale
from tailbound.transport.steps import step_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: A ``TailboundState``, whose module imports this one.
TailboundState: TypeAlias = Any

log = logging.getLogger("tailbound")

_NAME = "loss-scale"
#: Seconds that a rank with an overflow waits until the others have heard of it; who has not is told in the background.
_WAIT = 0.25
#: Seconds for one attempt to tell a rank, after one in vain, and after which it is given up.
_ATTEMPT, _PAUSE, _GIVE_UP = 2.0, 0.1, 60.0
#: Threads that tell, at most.
_TELLERS = 8


class Overflow(NamedTuple):
    """``own``: a gradient of this rank had Inf or NaN. ``void``: no rank had a part of a gradient."""

    own: bool = False
    void: bool = False


class OverflowNotes:
    """Of the step under way; noted by the transport thread, taken by the training thread at the step's end."""

    def __init__(self) -> None:
        #: what the step says so far
        self.so_far = Overflow()
        self._lock = threading.Lock()

    def note(self, outcome: Outcome) -> None:
        """Takes in what became of a bucket."""
        self.share(outcome.abstained, outcome.void)

    def share(self, own: bool, void: bool) -> None:
        """Takes in what those say, too, who average other parts of the same gradient."""
        with self._lock:
            self.so_far = Overflow(self.so_far.own or own, self.so_far.void or void)

    def take(self) -> Overflow:
        """What the step says, and begins the next one."""
        with self._lock:
            taken, self.so_far = self.so_far, Overflow()
            return taken


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a model that ``register`` has put under Tailbound; used in the same way.

    Args:
        state: what ``register`` returned.
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch, equal on all ranks.
            Powers of two cost no precision.

    Raises:
        ConfigError: the state has a scaler already, or has only one of several shards of its model (FSDP).
    """

    def __init__(
        self,
        state: TailboundState,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._join(state)

    def _join(self, state: TailboundState) -> None:
        """From now on the scale is that of all ranks of ``state``."""
        if state.scaler is not None:
            raise ConfigError("this state has a gradient scaler already: use one for all optimizers of the model")
        if self.is_enabled() and state.shards > 1 and state.communicator is not None and not state.shares_scale:
            raise ConfigError(
                f"each of the {state.shards} shards of this model is averaged by a job of its own, with a loss scale "
                "of its own, and a host would add gradients of different scales: train in bfloat16, without a scaler"
            )
        self._state = state
        self._told: Epoch | None = None
        self._agreed: Epoch | None = None  # the highest of others that may hold from the end of this step on
        self._tellers: list[threading.Thread] = []
        self._over = threading.Event()
        self._ours = self.is_enabled() and state.communicator is not None
        if not self._ours:
            return
        assert state.communicator is not None
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        scale, tracker = self._check_scale_growth_tracker("register")
        self._scales = LossScale(float(scale), state.communicator.step - int(tracker))
        self._newest = self._scales.epoch  # the highest known here
        self._lock = threading.Lock()
        state.scaler, state.loss_scale = self, float(scale)
        held, over = weakref.ref(self), self._over  # the thread that serves would keep the model

        def answered(request: bytes) -> Iterable[Buffer]:
            found = held()  # which may be that of another job by now
            return found._answer(request) if found is not None and found._over is over else []

        state.communicator.reliable.serve(_NAME, answered)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As in torch; a step in which no rank had a part of a gradient counts as one with infinite gradients."""
        super().unscale_(optimizer)
        self._mark_void(optimizer)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Any:
        found = super()._check_inf_per_device(optimizer)
        self._mark_void(optimizer)
        return found

    def _mark_void(self, optimizer: torch.optim.Optimizer) -> None:
        if self._ours and self._state.overflow.so_far.void:
            for found in self._found(optimizer):
                found.fill_(1.0)

    def _found(self, optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return found.values()

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Ends the step: the scale of the next one is that of the highest epoch that this rank knows.

        After an overflow here it waits until the others know of it, but not for long: a rank that does not answer is
        told in the background.
        """
        if not self._ours or self._state.outside:
            super().update(new_scale)
            return
        overflow = self._state.overflow.take()
        found = [f for state in self._per_optimizer_states.values() for f in state["found_inf_per_device"].values()]
        if new_scale is None and not found:
            super().update()  # says what is wrong
        step = step_of(self._state.last.label) + 1
        scale = self._scales.at(step - 1, self._growth_factor, self._growth_interval)
        heard = self._hear()
        written = None
        if new_scale is not None:
            written = self._scales.write(float(new_scale), step)
        elif not heard and (overflow.own or (not overflow.void and any(bool(f.item()) for f in found))):
            written = self._scales.write(scale * self._backoff_factor, step)
            text = f"gradients overflow at a loss scale of {scale:g}: now {written.scale:g}"
            self._state.say("overflow", text, logging.INFO)
        self._apply(step)
        if written is not None:
            self._tell(written)

    def catch_up(self) -> None:
        """Asks the others for their epoch: after a jump, words about newer ones may have been missed."""
        if self._ours:
            self._tell(self._scales.epoch)
            self._hear()
            self._apply(step_of(self._state.last.label) + 1)

    @property
    def epoch(self) -> tuple[int, int, float, float, int] | None:
        """What a rank that has come back takes over; None: no rank has a scale."""
        return self._scales.told if self._ours else None

    def take_over(self, told: tuple[int, int, float, float, int], step: int) -> None:
        """Goes on before ``step`` from another rank's ``epoch``."""
        if self._ours:
            self._scales.take_over(told)
            with self._lock:  # the own one may begin later, where it is of a newer checkpoint, and counts for nothing
                self._newest = self._scales.epoch
            self._hear()
            self._note(self._scales.epoch)
            self._apply(step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, on all ranks before the same step; states of torch's own scaler fit."""
        super().load_state_dict(state_dict)
        if self._ours and state_dict:
            assert self._state.communicator is not None
            step = self._state.communicator.step
            written = self._scales.write(state_dict["scale"], step, state_dict["_growth_tracker"])
            with self._lock:
                self._newest = written
            self._apply(step)

    def close(self) -> None:
        """Tells nobody any more, and scales as torch's own from now on; the state does this at its own end.

        Another state may take it in then (``adopt``). It keeps its class, since a thread may still be in its methods.
        """
        self._over.set()
        for teller in self._tellers:
            teller.join(_ATTEMPT)
        self._ours = False

    def _apply(self, step: int) -> None:
        """Lets the scale for ``step`` hold from now on, here and in the hook."""
        scale = self._scales.at(step, self._growth_factor, self._growth_interval)
        _, tracker = self._check_scale_growth_tracker("update")
        super().update(scale)
        tracker.fill_(self._scales.clean(step))
        self._state.loss_scale = scale

    def _hear(self) -> bool:
        """Takes in the highest of what others have written; returns whether it won."""
        with self._lock:
            heard, self._agreed = self._agreed, None
        return heard is not None and self._scales.hear(heard)

    # -- over the reliable path, in threads of its own

    @property
    def newest(self) -> Epoch | None:
        """The highest epoch known here; None: there is no scale."""
        if not self._ours:
            return None
        with self._lock:
            return self._newest

    def agree(self, epoch: Epoch) -> None:
        """All ranks of this host know of ``epoch`` in this step: it holds from its end on, if it wins."""
        self._note(epoch, agreed=True)

    def _answer(self, request: bytes) -> Iterable[Buffer]:
        return [self._heard(Epoch.unpack(request)).pack()]

    def _heard(self, epoch: Epoch) -> Epoch:
        """As ``_note``, of another rank: it is for the end of this step, unless the ranks of a host have to agree."""
        return self._note(epoch, agreed=not self._state.shares_scale)

    def _note(self, epoch: Epoch, *, agreed: bool = False) -> Epoch:
        """Keeps an epoch if it wins; returns the highest known here."""
        with self._lock:
            if epoch.beats(self._newest):
                self._newest = epoch
            if agreed and (self._agreed is None or epoch.beats(self._agreed)):
                self._agreed = epoch
            return self._newest

    def _tell(self, epoch: Epoch) -> None:
        """Tells all peers of ``epoch`` and hears theirs; waits for the live ones, at most ``_WAIT`` seconds.

        Who is dead, as far as is known, is told in the background if it lives again: it may have been stopped.
        """
        self._note(epoch)
        self._told = epoch
        live, heard = self._live(), threading.Semaphore(0)
        due = deque([*live, *(p for p in self._here() if p not in live)])
        self._tellers = [teller for teller in self._tellers if teller.is_alive()]
        for _ in range(min(_TELLERS, len(due))):
            # not of a pool: a process that ends would wait for its threads
            arguments = epoch, due, heard
            teller = threading.Thread(target=self._tell_each, args=arguments, name="tailbound-scale", daemon=True)
            teller.start()
            self._tellers.append(teller)
        until = time.monotonic() + _WAIT
        for _ in live:
            if not heard.acquire(timeout=max(0.0, until - time.monotonic())):
                return

    def _here(self) -> list[int]:
        """Peers that have not said goodbye."""
        assert self._state.communicator is not None
        here: list[int] = self._state.communicator.job.membership.here
        return here

    def _live(self) -> list[int]:
        """Peers that answer, as far as is known."""
        assert self._state.communicator is not None
        job = self._state.communicator.job
        live: list[int] = job.membership.alive(job.steps.own)
        return live

    def _tell_each(self, epoch: Epoch, due: deque[int], heard: threading.Semaphore) -> None:
        """Tells those who are ``due``; who is not live, or does not answer, comes again after the others."""
        until = time.monotonic() + _GIVE_UP
        while self._told is epoch and not self._over.is_set() and time.monotonic() < until:
            try:
                rank = due.popleft()
            except IndexError:  # what is left, others are at
                return
            if rank in self._live() and self._tell_one(rank, epoch):
                heard.release()
            elif rank in self._here():
                due.append(rank)
                self._over.wait(_PAUSE)

    def _tell_one(self, rank: int, epoch: Epoch) -> bool:
        """Tells one peer, and hears its epoch; returns whether it has answered."""
        assert self._state.communicator is not None
        pull: Callable[..., bytearray] = self._state.communicator.reliable.pull
        try:
            self._heard(Epoch.unpack(bytes(pull(rank, _NAME, epoch.pack(), _ATTEMPT, 64))))
        except TransportError as error:
            log.debug("rank %d: rank %d has not heard of the loss scale: %s", self._state.rank, rank, error)
            return False
        return True


def adopt(state: TailboundState, scaler: torch.amp.GradScaler) -> None:
    """Makes ``scaler``, torch's own, one of ours in its place: whoever holds it goes on with it.

    All ranks must do so before the same step. Its scale and growth tracker stay what they are.

    Raises:
        ConfigError: a scaler of another kind, one of another job that is not over, or an invalid one (see
            ``GradScaler``).
    """
    if not scaler.is_enabled() or (isinstance(scaler, GradScaler) and scaler._state is state):
        return
    if isinstance(scaler, GradScaler) and not scaler._ours:  # its job is over, or was one rank's
        scaler._join(state)
        return
    if type(scaler) not in _TORCHS:
        kind = type(scaler)
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} scales the loss of a registered model, and cannot see which ranks "
            "overflow: use tailbound.torch.GradScaler(state), one for each registered model"
        )
    before = type(scaler)
    scaler.__class__ = GradScaler
    try:
        scaler._join(state)  # type: ignore[attr-defined]
    except BaseException:
        scaler.__class__ = before
        raise


def at_work() -> torch.amp.GradScaler | None:
    """The scaler whose ``step`` the calling thread is in: it says itself to no hook of the optimizer."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _STEP:
        frame = frame.f_back  # type: ignore[assignment]
    found: torch.amp.GradScaler | None = None if frame is None else frame.f_locals["self"]
    return found


#: Classes that differ in their arguments only.
_TORCHS = (torch.amp.GradScaler, torch.cuda.amp.grad_scaler.GradScaler, torch.cpu.amp.grad_scaler.GradScaler)
_STEP = torch.amp.GradScaler.step.__code__

"""Where the program is in its step: what its optimizers have made of the averages that came (clock-20, clock-21)."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from tailbound.errors import ConfigError
from tailbound.torch.collectives import refuse_optimizer
from tailbound.torch.compat import scaler_at_work
from tailbound.torch.replica import Replica
from tailbound.torch.scaler import TailboundState, adopt
from tailbound.torch.turns import Turns

log = logging.getLogger("tailbound")

#: Backward passes after which a model that no optimizer has stepped is warned of: more than are accumulated as a rule.
_WITHOUT = 16


class Part:
    """A part of ``state``, which ends with the program's last reference to it."""

    def __init__(self, state: TailboundState) -> None:
        self._held = weakref.ref(state)

    @property
    def _state(self) -> TailboundState:
        state = self._held()
        assert state is not None
        return state


class Steps(Part):
    """Of the model of ``state``, by what hooks on its optimizers tell.

    Attributes:
        ended: the step whose last bucket is over, until its boundary.
        stepped: an optimizer has stepped since.
        void: averages of the iteration are zeros, so no optimizer makes anything of it (clock-38).
        turns: what iterations are made of.
    """

    def __init__(self, state: TailboundState) -> None:
        super().__init__(state)
        self.ended: int | None = None
        self.stepped = self.void = False
        self._over = False  # the iteration: the next averages are those of another one
        #: gradients that are kept from an optimizer while it steps, by its id
        self._kept = dict[int, list[tuple[torch.Tensor, torch.Tensor]]]()
        self.turns = Turns()
        #: optimizers of the model that are within ``step``, by id: a closure may make whole passes there. One that has
        #: raised stays until its next step is made; others then read less often than they could
        self._stepping = set[int]()
        self._looked_at: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._without = 0  # steps that no optimizer has followed, of a model that none is known of
        self._named = False
        self._asked_at: int | None = None  # the step that was half made when a batch was asked for
        self._asked_early = False  # and its optimizer has stepped only then

    @property
    def _replica(self) -> Replica | None:
        return self._state.resync.replica if self._state.resync is not None else None

    @property
    def half_made(self) -> bool:
        """Whether the averages of a step have come, and the optimizer is still to step (or leaves the step out)."""
        return self.ended is not None and not self.stepped and bool(self._state.optimizers)

    @property
    def announced(self) -> bool:
        """Whether an update would follow the present pass only after a hook of an optimizer has told of it."""
        return bool(self._state.optimizers) and not self._stepping

    def came(self, *, void: bool) -> None:
        """Averages have come; those of an iteration are void together."""
        self._kept.clear()  # of a step that raised
        if self._over:
            self.void = self._over = False
        self.void |= void

    def over(self) -> None:
        """The iteration is over, whether its optimizers have stepped or the program has left that out."""
        self._over = True

    def begin(self) -> None:
        """A pass begins, and as a rule an iteration."""
        self._over |= self.turns.begins

    def passed(self) -> None:
        """A pass has its averages."""
        self.turns.passed(inside=bool(self._stepping))

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """An optimizer, of whatever model, is about to step; returns other arguments where it gets a closure."""
        replica = self._replica
        if replica is None or not replica.adopt(optimizer):
            return None
        refuse_optimizer(optimizer)
        self.look_at(optimizer)
        self._see_scaler(optimizer)
        assert self._state.resync is not None
        self._state.resync.moment.disturb()
        replica.note_rates(optimizer, self._state.loss_scale)
        self._stepping.add(id(optimizer))
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):  # none, or an argument of the optimizer's own
            self._keep_void(optimizer)
            return None

        def evaluated() -> Any:
            loss = closure()
            self._keep_void(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], evaluated, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluated}

    def _keep_void(self, optimizer: torch.optim.Optimizer) -> None:
        """Keeps void gradients from ``optimizer``: zeros would move its momentum and weights, too (clock-38)."""
        if not self.void:
            return
        mine = [p for group in optimizer.param_groups for p in group["params"] if self._state.layout.knows(p)]
        # its own ``step`` may call that of its class, whose hooks find none
        self._kept.setdefault(id(optimizer), []).extend((p, p.grad) for p in mine if p.grad is not None)
        for parameter in mine:
            parameter.grad = None

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The step is made only now: a closure may have averaged in it, before the update."""
        for parameter, gradient in self._kept.pop(id(optimizer), ()):
            parameter.grad = gradient
        if any(optimizer is known for known in self._state.optimizers):
            self.over()
            self._stepping.discard(id(optimizer))
            self.turns.note(optimizer, begins=not self.stepped)
            self.stepped = True
            self._asked_early |= self.ended is not None and self._asked_at == self.ended

    def look_at(self, optimizer: torch.optim.Optimizer) -> None:
        """Says once what else ``optimizer`` steps."""
        if optimizer in self._looked_at:
            return
        self._looked_at.add(optimizer)
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        if beside := sum(p.requires_grad and not self._state.layout.knows(p) for p in stepped):
            log.warning(
                "rank %d: %s steps %d parameter(s) that are not of this model, too: they are not kept equal with it, "
                "and no rank that was away steps them where it applies what the others have averaged. Give them an "
                "optimizer of their own, or wrap them in the same DistributedDataParallel",
                self._state.rank,
                type(optimizer).__name__,
                beside,
            )

    def _see_scaler(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes in a scaler of torch's own that is stepping ``optimizer``, so that it hears of all overflows."""
        state, scaler = self._state, scaler_at_work()
        if scaler is None or scaler is state.scaler or not scaler.is_enabled():
            return
        adopt(state, scaler)
        log.info("rank %d: a torch.amp.GradScaler steps this model; its scale is that of all ranks now", state.rank)

    def name_what_stays(self) -> None:
        """After the first steps: says what of the optimizers' state cannot be given to another rank."""
        replica, rank = self._replica, self._state.rank
        assert replica is not None
        if not replica.optimizers:
            self._without += 1
            if self._without == _WITHOUT:
                log.warning(
                    "rank %d: no torch.optim.Optimizer has stepped this model in its first %d backward passes: what "
                    "steps it is not known, so a rank that misses something cannot be made equal in it, nor apply what "
                    "the others have averaged. Pass optimizer= to register",
                    rank,
                    _WITHOUT,
                )
        if self._named or not any(optimizer.state for optimizer in replica.optimizers):
            return
        self._named = True
        try:
            replica.describe()
        except ConfigError as error:
            log.warning("rank %d: this rank's state cannot be given to a rank that was away: %s", rank, error)

    def between_iterations(self) -> bool:
        """Whether the last pass is through, for whoever takes the next batch: no optimizer is still to step.

        Raises:
            ConfigError: it was asked before, and the optimizer has stepped only then.
        """
        if self._asked_early:
            raise ConfigError(
                "tailbound.torch.batches was asked for a batch between backward() and optimizer.step(), where no step "
                "can be applied: ask for it after the step. What reads ahead belongs inside, as in "
                "batches(prefetch(loader), state)"
            )
        self._asked_at = self.ended if self.half_made else None
        return self._asked_at is None

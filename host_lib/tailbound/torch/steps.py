"""What lies between two updates of the loop's optimizers, and where the program is in it (clock-20, clock-21).

An iteration may have several passes whose gradients are averaged (SAM, a discriminator's two losses, accumulation
without ``no_sync``), each followed by optimizers or by none. What it is made of is learned from the last ones. A step
that is applied without computing it has the same optimizers. A rank that left out some of an iteration's passes would
be in another one than the others for ever.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from tailbound.errors import ConfigError
from tailbound.torch.compat import scaler_at_work
from tailbound.torch.replica import Replica
from tailbound.torch.scaler import TailboundState, adopt

log = logging.getLogger("tailbound")

#: Backward passes after which a model that no optimizer has stepped is warned of: more than are accumulated as a rule.
_WITHOUT = 16
#: Optimizers of one step. Weak, since the program may drop one for good (another phase of training).
Turn: TypeAlias = "tuple[weakref.ref[torch.optim.Optimizer], ...]"
#: Steps that are remembered: a loop that repeats within half of them is known for certain.
_MOST = 32
#: Iterations that have to be alike; and distances of steps, in iterations, for a loop to make one in several.
_ALIKE, _APART = 8, 5
#: In place of a step that has ended: one that a rank outside made by itself, or that was void.
BY_ITSELF = -1
#: Passes after which an iteration that nobody has ended is given up.
_LONGEST = 256

#: Optimizers whose ``step()`` is a collective; by name, since importing them costs and warns.
_OPTIMIZERS = {
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": "shards its state over the ranks and "
    "broadcasts parameters in every step, so no step is bounded, and a rank's state cannot be made equal to another's: "
    "give every rank a plain optimizer, or shard inside a host by FSDP2 (tailbound.torch.fsdp)",
    "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer": "averages parameters over the ranks in "
    "step(), where one that skips a step would hold all others: give the optimizer inside it",
}


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
    """Of the model of ``state``, by what hooks on its optimizers tell."""

    def __init__(self, state: TailboundState) -> None:
        super().__init__(state)
        self.ended: int | None = None  #: the step whose last bucket is over, until its boundary
        self.stepped = False  #: an optimizer has stepped since
        self.void = False  #: averages of the iteration are zeros, so no optimizer makes anything of it (clock-38)
        self.short_ends = set[bool]()  #: whether the last batches of a loader made a step, where they were too few
        self._over = False  # the iteration: the next averages are those of another one
        self._kept = dict[int, list[tuple[torch.Tensor, torch.Tensor]]]()  # gradients kept from an optimizer, by its id
        #: the optimizers of the last steps: all in every step, as a rule; others alternate, or are replaced
        self._turns: deque[Turn] = deque(maxlen=_MOST)
        #: passes of the iteration that is under way, each with the optimizers that followed it
        self._open: list[Turn] = []
        #: the last iteration in which an optimizer has stepped, and passes of the last iterations
        self._last: tuple[Turn, ...] = ()
        self._lengths: deque[int] = deque(maxlen=_ALIKE)
        self._idle: int | None = None  # iterations since the last step of this loop
        self._apart: Counter[int] = Counter()  # such distances of steps, of all loops
        #: optimizers of the model that are within ``step``, by id: a closure may make whole passes there. One that has
        #: raised stays until its next step is made; others then read less often than they could
        self._stepping = set[int]()
        self._looked_at: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._without = 0  # steps that no optimizer has followed, of a model that none is known of
        self._named = False
        self._asked = False  # for a batch, while a step was half made
        self._asked_early = False  # and its optimizer has stepped only then
        self.made = 0  #: steps whose averages have come, and those that this process has made by itself

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

    def averaged(self, step: int) -> None:
        """The last averages of ``step`` have come, or ``BY_ITSELF``."""
        self.ended, self.stepped, self._asked = step, False, False
        self.made += 1

    def came(self, *, void: bool) -> None:
        """Averages have come; those of an iteration are void together."""
        self._kept.clear()  # of a step that raised
        if self._over:
            self.void = self._over = False
        self.void |= void

    def over(self) -> None:
        """The iteration is over, whether its optimizers have stepped or the program has left that out."""
        self._over = True
        if self._state.resync is not None:
            self._state.resync.moment.disturb()  # loss scale and schedules move next

    def begin(self) -> None:
        """A pass begins, and as a rule an iteration."""
        self._over |= bool(self.passes) and len(self._open) % self.passes == 0

    def passed(self) -> None:
        """A pass has its averages."""
        if self._stepping and self._open and not self._open[-1]:
            self._lengths.append(0)  # who evaluates several times in a step cannot make it of averages alone
        if len(self._open) == _LONGEST:
            self.split()
            if len(self._open) == _LONGEST:
                self._open.clear()
                self._lengths.append(0)
        self._open.append(())

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """An optimizer, of whatever model, is about to step; returns other arguments where it gets a closure."""
        replica = self._replica
        if replica is None or not replica.adopt(optimizer):
            return None
        refuse_optimizer(optimizer)
        self.look_at(optimizer)
        self._see_scaler()
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
            self.note(optimizer, begins=not self.stepped)
            self.stepped = True
            self._asked_early |= self._asked

    def note(self, optimizer: torch.optim.Optimizer, *, begins: bool) -> None:
        """``optimizer`` has stepped; ``begins``: as the first one of a step."""
        before = () if begins or not self._turns else self._turns.pop()
        held = weakref.ref(optimizer)
        self._turns.append(before if held in before else (*before, held))
        if self._open and held not in self._open[-1]:
            self._open[-1] += (held,)

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

    def _see_scaler(self) -> None:
        """Takes in a scaler of torch's own that is at work, so that it hears of all overflows."""
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
        """Whether no optimizer is still to step; a ``ConfigError`` if one has only after this was asked before."""
        if self._asked_early:
            raise ConfigError(
                "tailbound.torch.batches was asked for a batch between backward() and optimizer.step(), where no step "
                "can be applied: ask for it after the step. What reads ahead belongs inside, as in "
                "batches(prefetch(loader), state)"
            )
        self._asked = self.half_made
        return not self._asked

    # -- what iterations are made of

    def start(self) -> None:
        """A loop begins: what was under way before is no iteration of it."""
        self._open, self._idle = [], None

    @property
    def updates(self) -> bool:
        """Whether averages of the iteration under way have come, and been applied or left out (an overflow)."""
        return bool(self._open) and self._over

    def iterate(self) -> None:
        """An iteration of the loop is over."""
        whole, self._open = tuple(self._open), []
        if self._idle is not None:
            self._idle += 1
        if any(whole):
            self._last = whole
            if self._idle is not None:
                self._apart[self._idle] += 1
            self._idle = 0
        if whole:
            self._lengths.append(len(whole))

    def split(self) -> None:
        """Where nobody says when an iteration is over it is over after the last pass that an optimizer has followed."""
        if not self._turns:  # of optimizers that are not known
            self._open.clear()
        ends = [number for number, turn in enumerate(self._open, 1) if turn]
        for begin, end in zip([0, *ends], ends, strict=False):
            self._last = tuple(self._open[begin:end])
            self._lengths.append(end - begin)
        del self._open[: max(ends, default=0)]

    @property
    def passes(self) -> int:
        """Passes of an iteration; 0: they differ from one to the next, or an optimizer makes several within a step."""
        lengths = set(self._lengths)
        if len(lengths) > 1:
            return 0
        return lengths.pop() if lengths else 1

    def iterations(self, passes: int) -> int:
        """So many passes in iterations, as near as that is known."""
        known = sum(self._lengths)
        return round(passes * len(self._lengths) / known) if known else passes

    @property
    def apart(self) -> int:
        """Iterations to a step, where they have never been others; else 1: some loops leave steps out, at random."""
        return next(iter(self._apart)) if len(self._apart) == 1 and self._apart.total() >= _APART else 1

    def iteration(self) -> Sequence[Turn | None]:
        """Who steps after each pass of an iteration, from the next one on; None: whose turn it is. Empty: not known."""
        if self.passes == 1:
            return [None]
        if not self.passes or len(self._last) != self.passes:
            return []
        made = len(self._open) % self.passes
        return self._last[made:] + self._last[:made]

    @property
    def shared(self) -> bool:
        """Whether no optimizer steps between the next pass and the one before or behind it, as far as that is known."""
        return self._open[-1:] == [()] or self.iteration()[:1] == ((),)

    def due(self, known: Sequence[torch.optim.Optimizer], turn: Turn | None = None) -> list[torch.optim.Optimizer]:
        """Those of ``known`` of ``turn``, or whose turn the next step is; all of them while nothing says otherwise."""
        wanted = self._next() if turn is None else turn
        return [one for one in known if any(one is held() for held in wanted)] or list(known)

    def _next(self) -> Turn:
        """What came after the like of the last steps: so far back as most of them are alike, else the last one."""
        turns = list(self._turns)
        alike = {back: _alike(turns[back:][::-1], turns[:-back][::-1]) for back in range(1, len(turns))}
        back = max(alike, key=lambda one: (alike[one], -one), default=1)
        return turns[-back] if turns else ()


def _alike(mine: Sequence[Turn], theirs: Sequence[Turn]) -> int:
    """How many of the first are equal."""
    equal = [a == b for a, b in zip(mine, theirs, strict=True)]
    return equal.index(False) if False in equal else len(equal)


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose ``step()`` is a collective, or makes other passes on each rank."""
    if isinstance(optimizer, torch.optim.LBFGS) and any(
        group["max_iter"] > 1 or group["line_search_fn"] for group in optimizer.param_groups
    ):
        raise ConfigError(
            "LBFGS decides by each rank's own loss how many backward passes a step has, and ranks would average "
            "different ones: give it max_iter=1 and no line_search_fn"
        )
    for kind in type(optimizer).__mro__:
        why = _OPTIMIZERS.get(f"{kind.__module__}.{kind.__qualname__}")
        if why is not None:
            raise ConfigError(f"{kind.__name__} {why}")

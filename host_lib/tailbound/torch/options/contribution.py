"""What a rank contributes for a bucket: its gradient, and what earlier steps have left to be said.

- ``late="carry"`` (codec-15): a gradient that came too late to be sent at all is averaged with the next one.
  Half of their sum, not their sum: a gradient that counts twice makes steps longer (1.075 times at 30 % late).
- Error feedback (EF-SGD, Karimireddy et al., ICML 2019): what rounding and clipping kept back of the last contribution
  is added to this one (``codec.feedback``).

What is kept has no loss scale, which may be another one in the next step.

Nothing is kept before DDP has settled on its buckets: it builds them anew after the first step or, with a static
graph, after the second, and the same number of entries may then mean other parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError
from tailbound.torch.memory import Bucket

#: Steps of which nothing is kept.
_UNSETTLED = 2


@dataclass
class _Kept:
    """What is kept for one bucket: a gradient that came too late in ``step``, and what codes left unsaid; f32[n]."""

    kind: tuple[int, torch.device]
    carried: torch.Tensor | None = None
    step: int = 0
    residual: torch.Tensor | None = None


@dataclass
class Contribution:
    """One bucket of one step.

    Attributes:
        source: what is coded, after ``prepare``.
        prepare: to be called in the transport thread before ``source`` is read.
        residual: f32[n] that the engine writes, or None.
        present: the gradient itself, until the average is there.
        factor: what it is multiplied by to be coded: one over the loss scale.
        step: a count of steps here.
    """

    source: torch.Tensor
    prepare: Callable[[], None] | None
    residual: torch.Tensor | None
    present: torch.Tensor
    factor: float
    step: int


class Contributions:
    """Puts contributions together, and keeps by bucket what belongs to the next one.

    Args:
        late: ``drop`` or ``carry``.
        feedback: error feedback.
        copies: whether the hook returns before the average is there, so that gradients have to be copied at once.

    Raises:
        ConfigError: ``late`` is something else.
    """

    def __init__(self, late: str, feedback: bool, copies: bool) -> None:
        if late not in ("drop", "carry"):
            raise ConfigError(f'late={late!r}: give "drop" or "carry"')
        self.late, self.feedback, self._copies = late, feedback, copies
        self._kept: dict[int, _Kept] = {}
        self._steps = 0
        #: contributions that had a late gradient in them
        self.carried = 0

    def begin(self, index: int, tensor: torch.Tensor, last: bool, space: Bucket, factor: float = 1.0) -> Contribution:
        """The contribution of bucket ``index``: ``tensor``, of any float type, and what is kept for it.

        Args:
            index: of the bucket in its step.
            tensor: the gradient.
            last: this bucket ends the step.
            space: memory of the bucket; a type that it is decoded to is coded as it is.
            factor: one over the loss scale.
        """
        step = self._steps
        self._steps += last
        present = tensor.detach()
        if self._copies:
            present = space.aside().copy_(present)
        kept = self._of(index, present)
        carried = kept.carried if kept.step == step - 1 else None
        kept.carried = None
        self.carried += carried is not None
        if self.feedback and step >= _UNSETTLED and kept.residual is None:
            kept.residual = torch.zeros_like(present, dtype=torch.float32)
        residual = kept.residual
        plain = present.dtype in (torch.float32, space.decoded) and factor == 1.0
        if carried is None and residual is None and plain:
            return Contribution(present, None, None, present, factor, step)
        source = space.staged()
        prepare = _Compose(source, present, factor, carried, residual)
        return Contribution(source, prepare, residual, present, factor, step)

    def end(self, index: int, contribution: Contribution, outcome: Outcome) -> None:
        """Takes in what became of it, before its memory is used again; in the transport thread."""
        present, step = contribution.present, contribution.step
        if self.late != "carry" or not outcome.unsent or step < _UNSETTLED or not present.isfinite().all():
            return
        kept = self._of(index, present)
        kept.carried, kept.step = present.to(torch.float32, copy=True).mul_(contribution.factor), step

    def forget_late(self, index: int | None = None) -> None:
        """Drops late gradients, of all buckets or one: the next step is another one than theirs."""
        for at, kept in self._kept.items():
            if index in (None, at):
                kept.carried = None

    def forget(self) -> None:
        """Drops all that is kept: the parameters are others now."""
        self._kept.clear()

    def _of(self, index: int, tensor: torch.Tensor) -> _Kept:
        kind = tensor.numel(), tensor.device
        kept = self._kept.get(index)
        if kept is None or kept.kind != kind:
            kept = self._kept[index] = _Kept(kind)
        return kept


class _Compose:
    """Writes into ``target`` f32[n]: the gradient, or half of its sum with a late one, plus the residual."""

    def __init__(
        self,
        target: torch.Tensor,
        present: torch.Tensor,
        factor: float,
        carried: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> None:
        self._target, self._present, self._factor = target, present, factor
        self._carried, self._residual = carried, residual

    def __call__(self) -> None:
        if self._present.dtype == torch.float32:
            torch.mul(self._present, self._factor, out=self._target)
        else:  # in float32, since a half-precision gradient times a small factor would vanish
            self._target.copy_(self._present).mul_(self._factor)
        if self._carried is not None:
            self._target.add_(self._carried).mul_(0.5)
        if self._residual is not None:
            self._target.add_(self._residual)

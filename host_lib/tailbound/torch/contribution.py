"""What a rank contributes for a bucket: its gradient, and what codes have left unsaid of earlier ones.

Error feedback (EF-SGD, Karimireddy et al., ICML 2019): what rounding and clipping kept back of the last contribution is
added to this one (``codec.feedback``). What is kept has no loss scale, which may be another one in the next step.

Nothing is kept before DDP has settled on its buckets: it builds them anew after the first step or, with a static
graph, after the second, and the same number of entries may then mean other parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tailbound.torch.memory import Bucket

#: Steps of which nothing is kept.
_UNSETTLED = 2


@dataclass
class Contribution:
    """One bucket of one step.

    Attributes:
        source: what is coded, after ``prepare``.
        prepare: to be called in the transport thread before ``source`` is read.
        residual: f32[n] that the engine writes, or None.
    """

    source: torch.Tensor
    prepare: Callable[[], None] | None = None
    residual: torch.Tensor | None = None


class Contributions:
    """Puts contributions together, and keeps by bucket what belongs to the next one.

    Args:
        feedback: error feedback.
    """

    def __init__(self, feedback: bool) -> None:
        self.feedback = feedback
        self._residuals: dict[int, torch.Tensor] = {}
        self._steps = 0

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
        residual = self._residual(index, present) if self.feedback and step >= _UNSETTLED else None
        if residual is None and factor == 1.0 and present.dtype in (torch.float32, space.decoded):
            return Contribution(present)
        source = space.staged()
        return Contribution(source, partial(_compose, source, present, factor, residual), residual)

    def forget(self) -> None:
        """Drops all that is kept: the parameters are others now."""
        self._residuals.clear()

    def _residual(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._residuals.get(index)
        if kept is None or (kept.numel(), kept.device) != (tensor.numel(), tensor.device):
            kept = self._residuals[index] = torch.zeros_like(tensor, dtype=torch.float32)
        return kept


def _compose(target: torch.Tensor, present: torch.Tensor, factor: float, residual: torch.Tensor | None) -> None:
    """Writes into ``target`` f32[n]: the gradient, times ``factor``, plus the residual."""
    if present.dtype == torch.float32:
        torch.mul(present, factor, out=target)
    else:  # in float32, since a half-precision gradient times a small factor would vanish
        target.copy_(present).mul_(factor)
    if residual is not None:
        target.add_(residual)

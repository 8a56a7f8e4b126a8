"""Memory of the buckets, kept from step to step, and what is contributed for them out of it.

Error feedback (EF-SGD, Karimireddy et al., ICML 2019): what rounding and clipping kept back of the last contribution is
added to this one (``codec.feedback``). What is kept has no loss scale, which may be another one in the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tailbound.errors import ConfigError
from tailbound.torch.paths import DTYPES, KINDS

#: Types that can be averaged, by name.
SUPPORTED = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)


class Memory:
    """Memory of each bucket beside the bucket itself, by its index; each part is made when it is needed first."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, str], torch.Tensor] = {}

    def part(self, index: int, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A part of so many entries, of zeros where it is new; made anew when DDP makes its buckets anew."""
        found = self._parts.get((index, name))
        if found is None or (found.numel(), found.dtype, found.device) != (numel, dtype, device):
            found = self._parts[index, name] = torch.zeros(numel, dtype=dtype, device=device)
        return found

    def contribution(
        self, index: int, present: torch.Tensor, factor: float = 1.0, *, direct: bool, feedback: bool = False
    ) -> tuple[torch.Tensor, Callable[[], None] | None, torch.Tensor | None]:
        """What is contributed for ``present``: itself, and with ``feedback`` what is kept of the last contribution.

        ``factor``: one over the loss scale. ``direct``: its type is coded as it is. Returns what is coded, what the
        transport thread is to call before it reads that, and f32[n] that the engine writes.
        """
        if direct and factor == 1.0 and not feedback:
            return present, None, None
        kind = present.numel(), torch.float32, present.device
        source, residual = self.part(index, "staged", *kind), self.part(index, "residual", *kind) if feedback else None
        return source, partial(_compose, source, present, factor, residual), residual

    def forget(self) -> None:
        """Drops what is kept of contributions: the parameters are others now."""
        for index, name in list(self._parts):
            if name == "residual":
                del self._parts[index, name]


def _compose(target: torch.Tensor, present: torch.Tensor, factor: float, residual: torch.Tensor | None) -> None:
    """Writes into ``target`` f32[n]: the gradient, times ``factor``, plus the residual."""
    if present.dtype == torch.float32:
        torch.mul(present, factor, out=target)
    else:  # in float32, since a half-precision gradient times a small factor would vanish
        target.copy_(present).mul_(factor)
    if residual is not None:
        target.add_(residual)


def check(index: int, tensor: torch.Tensor) -> None:
    """Refuses a tensor of a type, layout or device that cannot be averaged."""
    if tensor.layout != torch.strided:
        raise ConfigError(f"bucket {index} is {tensor.layout}: sparse gradients are not supported; use sparse=False")
    if tensor.device.type not in KINDS:
        raise ConfigError(f"bucket {index} is on {tensor.device}: give CPU or CUDA tensors")
    if tensor.dtype not in DTYPES:
        raise ConfigError(f"bucket {index} has dtype {tensor.dtype}: use one of {SUPPORTED}")

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


class Bucket:
    """Memory of one bucket beside the bucket itself; each part is made when it is needed first.

    Args:
        numel, dtype, device: of the bucket.
        decoded: type that its average is decoded to: its own, or float32.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, decoded: torch.dtype) -> None:
        self.kind = numel, dtype, device, decoded
        self._parts: dict[str, torch.Tensor] = {}

    @property
    def decoded(self) -> torch.dtype:
        """Type that the average is decoded to; a gradient of this type is coded as it is."""
        return self.kind[-1]

    def targets(self, into: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """What is decoded to, and what DDP gets (``into`` if that is given); one and the same if the types are."""
        dtype = self.kind[1]
        result = self._part("result", dtype) if into is None else into
        return (result if self.decoded == dtype else self._part("decoded", self.decoded)), result

    def contribution(
        self, tensor: torch.Tensor, factor: float = 1.0, *, feedback: bool = False
    ) -> tuple[torch.Tensor, Callable[[], None] | None, torch.Tensor | None]:
        """What is contributed: ``tensor``, and with ``feedback`` what is kept of the last contribution.

        One of the type that is decoded to is coded as it is. ``factor``: one over the loss scale.

        Returns:
            What is coded; what the transport thread is to call before it reads that; f32[n] that the engine writes.
        """
        present = tensor.detach()
        if not feedback and factor == 1.0 and present.dtype in (torch.float32, self.decoded):
            return present, None, None
        if feedback and "residual" not in self._parts:
            self._part("residual", torch.float32).zero_()
        source, residual = self._part("staged", torch.float32), self._parts["residual"] if feedback else None
        return source, partial(_compose, source, present, factor, residual), residual

    def forget(self) -> None:
        """Drops what is kept of the last contribution."""
        self._parts.pop("residual", None)

    def _part(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._parts:
            numel, _, device, _ = self.kind
            self._parts[name] = torch.empty(numel, dtype=dtype, device=device)
        return self._parts[name]


class Memory:
    """One ``Bucket`` for each index, made anew when DDP makes its buckets anew."""

    def __init__(self) -> None:
        self._buckets: dict[int, Bucket] = {}

    def of(
        self,
        index: int,
        numel: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        *,
        native: bool = False,
    ) -> Bucket:
        """Memory of bucket ``index``, made anew if it is another one now.

        ``native``: it is coded and decoded in its own type, without copies in float32.
        """
        made = Bucket(numel, dtype, device or torch.device("cpu"), dtype if native else torch.float32)
        found = self._buckets.get(index)
        # DDP builds its buckets anew after the first step: the old memory of this index goes
        if found is None or found.kind != made.kind:
            found = self._buckets[index] = made
        return found

    def forget(self) -> None:
        """Drops what is kept of contributions: the parameters are others now."""
        for bucket in self._buckets.values():
            bucket.forget()


def _compose(target: torch.Tensor, present: torch.Tensor, factor: float, residual: torch.Tensor | None) -> None:
    """Writes into ``target`` f32[n]: the gradient, times ``factor``, plus the residual."""
    if present.dtype == torch.float32:
        torch.mul(present, factor, out=target)
    else:  # in float32, since a half-precision gradient times a small factor would vanish
        target.copy_(present).mul_(factor)
    if residual is not None:
        target.add_(residual)


def check(index: int, tensor: torch.Tensor) -> None:
    """Refuses what cannot be averaged.

    Raises:
        ConfigError: a type, layout or device that is not supported.
    """
    if tensor.layout != torch.strided:
        raise ConfigError(f"bucket {index} is {tensor.layout}: sparse gradients are not supported; use sparse=False")
    if tensor.device.type not in KINDS:
        raise ConfigError(f"bucket {index} is on {tensor.device}: give CPU or CUDA tensors")
    if tensor.dtype not in DTYPES:
        raise ConfigError(f"bucket {index} has dtype {tensor.dtype}: use one of {SUPPORTED}")

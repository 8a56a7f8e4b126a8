"""Memory of the buckets, kept from step to step, and what is done to a gradient before it is coded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tailbound.errors import ConfigError
from tailbound.torch.paths import KINDS

#: Types of buckets that can be averaged; sums are taken in the rotated domain, in float32.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class Bucket:
    """Memory of one bucket: what is coded (None: the bucket itself), what is decoded, what DDP gets."""

    source: torch.Tensor | None
    decoded: torch.Tensor
    result: torch.Tensor
    #: gradient of the last step that came too late to be sent, with ``late="carry"``
    carried: torch.Tensor | None = None

    @property
    def kind(self) -> tuple[int, torch.dtype, torch.device, torch.dtype]:
        """Entries, type, device, and the type that is decoded to."""
        return self.result.numel(), self.result.dtype, self.result.device, self.decoded.dtype

    def staged(self) -> torch.Tensor:
        """Float32 memory for what is coded in place of the bucket itself."""
        if self.source is None:
            self.source = torch.empty_like(self.decoded)
        return self.source


class Memory:
    """One ``Bucket`` for each index, made anew when DDP makes its buckets anew."""

    def __init__(self) -> None:
        self._buckets: dict[int, Bucket] = {}

    def of(
        self, index: int, numel: int, dtype: torch.dtype, device: torch.device | None = None, *, native: bool = False
    ) -> Bucket:
        """Memory of bucket ``index``, made anew if it is another one now.

        Args:
            index: of the bucket in its step.
            numel: its entries.
            dtype: its type.
            device: where it lies; default: on the host.
            native: it is coded and decoded in its own type, without copies in float32.
        """
        wanted = (numel, dtype, device or torch.device("cpu"), dtype if native else torch.float32)
        found = self._buckets.get(index)
        # DDP builds its buckets anew after the first step: the old memory of this index goes
        if found is None or found.kind != wanted:
            decoded = torch.empty(numel, dtype=wanted[-1], device=device)
            if decoded.dtype == dtype:
                found = Bucket(None, decoded, decoded)
            else:
                found = Bucket(torch.empty_like(decoded), decoded, torch.empty(numel, dtype=dtype, device=device))
            self._buckets[index] = found
        return found

    def forget_late(self) -> None:
        """Drops gradients kept for the next step: it is another one now."""
        for bucket in self._buckets.values():
            bucket.carried = None


class Copy:
    """Copies a bucket, times ``factor``, into float32 memory, in the transport thread."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor, factor: float = 1.0) -> None:
        self._target, self._source, self._factor = target, source, factor

    def __call__(self) -> None:
        """Copies; multiplied in float32, since a half-precision gradient times a small factor would vanish."""
        if self._source.dtype == torch.float32:
            torch.mul(self._source, self._factor, out=self._target)
            return
        self._target.copy_(self._source)
        if self._factor != 1.0:
            self._target.mul_(self._factor)


class Carry:
    """Averages a carried gradient with the present one times ``factor``, in the transport thread (CODEC.md rule 15)."""

    def __init__(self, carried: torch.Tensor, present: torch.Tensor, factor: float = 1.0) -> None:
        self._carried, self._present, self._factor = carried, present, factor

    def __call__(self) -> None:
        """Averages in place of the carried one."""
        self._carried.add_(self._present, alpha=self._factor).mul_(0.5)


def check(index: int, tensor: torch.Tensor) -> None:
    """Refuses what cannot be averaged.

    Raises:
        ConfigError: a type, layout or device that is not supported.
    """
    if tensor.layout != torch.strided:
        raise ConfigError(f"bucket {index} is {tensor.layout}: sparse gradients are not supported; use sparse=False")
    if tensor.device.type not in KINDS:
        raise ConfigError(f"bucket {index} is on {tensor.device}: only CPU and CUDA tensors can be averaged")
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ConfigError(f"bucket {index} has dtype {tensor.dtype}: supported are {names}")

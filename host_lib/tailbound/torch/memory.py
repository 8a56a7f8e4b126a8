"""Memory of the buckets, kept from step to step."""

from __future__ import annotations

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
        """What is decoded to, and what DDP gets; one and the same if the types are.

        Args:
            into: what DDP is to get; None: memory of this object's own.
        """
        dtype = self.kind[1]
        result = self._part("result", dtype) if into is None else into
        return (result if self.decoded == dtype else self._part("decoded", self.decoded)), result

    def staged(self) -> torch.Tensor:
        """Float32 memory in which a contribution is put together."""
        return self._part("staged", torch.float32)

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

        Args:
            index: of the bucket in its step.
            numel: its entries.
            dtype: its type.
            device: where it lies; default: on the host.
            native: it is coded and decoded in its own type, without copies in float32.
        """
        made = Bucket(numel, dtype, device or torch.device("cpu"), dtype if native else torch.float32)
        found = self._buckets.get(index)
        # DDP builds its buckets anew after the first step: the old memory of this index goes
        if found is None or found.kind != made.kind:
            found = self._buckets[index] = made
        return found


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

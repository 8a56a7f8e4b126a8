"""Memory of the buckets, kept from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tailbound.errors import ConfigError
from tailbound.torch.paths import DTYPES, KINDS


@dataclass
class Bucket:
    """Memory of one bucket: what is decoded, what DDP gets, and what is coded where that is not the bucket itself."""

    decoded: torch.Tensor
    result: torch.Tensor
    source: torch.Tensor | None = None
    copy: torch.Tensor | None = None

    @property
    def kind(self) -> tuple[int, torch.dtype, torch.device, torch.dtype]:
        """Entries, type, device, and the type that is decoded to."""
        return self.result.numel(), self.result.dtype, self.result.device, self.decoded.dtype

    def staged(self) -> torch.Tensor:
        """Float32 memory in which a contribution is put together."""
        if self.source is None:
            self.source = torch.empty_like(self.decoded, dtype=torch.float32)
        return self.source

    def aside(self) -> torch.Tensor:
        """Float32 memory in which a gradient stays while its bucket is used for something else."""
        if self.copy is None:
            self.copy = torch.empty_like(self.decoded, dtype=torch.float32)
        return self.copy


class Memory:
    """One ``Bucket`` for each index and turn, made anew when DDP makes its buckets anew."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int], Bucket] = {}

    def of(
        self,
        index: int,
        numel: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        *,
        native: bool = False,
        turn: int = 0,
    ) -> Bucket:
        """Memory of bucket ``index``, made anew if it is another one now.

        Args:
            index: of the bucket in its step.
            numel: its entries.
            dtype: its type.
            device: where it lies; default: on the host.
            native: it is coded and decoded in its own type, without copies in float32.
            turn: 0 or 1, where two steps use memory of their own (``options.delayed``).
        """
        wanted = (numel, dtype, device or torch.device("cpu"), dtype if native else torch.float32)
        found = self._buckets.get((index, turn))
        # DDP builds its buckets anew after the first step: the old memory of this index goes
        if found is None or found.kind != wanted:
            decoded = torch.empty(numel, dtype=wanted[-1], device=device)
            result = decoded if decoded.dtype == dtype else torch.empty(numel, dtype=dtype, device=device)
            found = self._buckets[index, turn] = Bucket(decoded, result)
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
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ConfigError(f"bucket {index} has dtype {tensor.dtype}: supported are {names}")

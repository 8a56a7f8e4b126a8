"""Steps that the others have finished, applied without computing them (clock-20).

The transport of a rank that was stopped has received their averages all the while. Such a step needs no forward and no
backward pass: its averages go into ``.grad``, and the optimizer steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from tailbound.errors import ConfigError
from tailbound.torch.compat import GradBucket
from tailbound.torch.replica import DIGEST, digest_of, flat


@dataclass(frozen=True)
class _Share:
    """Where a parameter's gradient lies in its bucket."""

    parameter: torch.Tensor
    offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """One bucket as DDP made it; ``parts`` is alike on ranks that have the same parameters at the same places of it."""

    index: int
    numel: int
    dtype: torch.dtype
    last: bool
    shares: tuple[_Share, ...]
    device: torch.device
    parts: str = ""

    @cached_property
    def form(self) -> tuple[object, ...]:
        """What tells it from another one of the same index."""
        return self.last, *((id(share.parameter), share.offset, share.stride) for share in self.shares)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where its tensors begin, rising."""
        return tuple(sorted(share.offset for share in self.shares))


class Layout:
    """DDP's buckets of the last steps, noted by the hook."""

    #: DDP builds its buckets anew after the first step or two: steps in which every call is looked at, steps after
    #: which they may be settled, and steps running whose buckets are then alike.
    _UNSETTLED, _REBUILT, _ALIKE = 4, 3, 2

    def __init__(self) -> None:
        self._buckets: dict[int, Bucket] = {}
        self._sparse = False
        self._steps, self._alike, self._changed = 0, 0, False
        self._numbers: dict[int, int] = {}
        self._graph: tuple[list[torch.Tensor], Callable[[], torch.Tensor | None]] | None = None

    def follow(self, parameters: Iterable[torch.Tensor], used: Callable[[], torch.Tensor | None]) -> None:
        """A graph is static: DDP gives parameters that no rank uses no gradient, though they have places in buckets.

        ``parameters``: in DDP's order. ``used``: how many ranks use each, once a step has been made.
        """
        self._graph = list(parameters), used

    def unused(self) -> set[int]:
        """Parameters that no rank uses, by ``id``. Between two steps, in the training thread: DDP locks its answer."""
        if self._graph is None or not self.step():  # before the first one DDP has no answer, but memory of anything
            return set()
        parameters, ask = self._graph
        used = ask()
        if used is None or used.numel() != len(parameters):  # parameters were frozen since, or the model is gone
            return set()
        return {id(p) for p, ranks in zip(parameters, used.tolist(), strict=True) if not ranks}

    def compare(self, parameters: Iterable[torch.Tensor]) -> None:
        """From now on buckets have ``parts``; ``parameters``: those of the model, in an order that all ranks share."""
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether it is one of the model's."""
        return id(parameter) in self._numbers

    def parts(self, index: int) -> str:
        """``Bucket.parts`` of the bucket ``index`` that was noted last."""
        known = self._buckets.get(index)
        return known.parts if known is not None else ""

    def note_sparse(self, *, last: bool) -> None:
        """A bucket is sparse: its averages are not kept anywhere, so no step can be applied without computing it."""
        self._sparse = True
        if last:
            self._end()

    @property
    def settled(self) -> bool:
        """Whether DDP has built its buckets for good: before that, other ranks may have others in a later step."""
        return self._steps >= self._REBUILT and self._alike >= self._ALIKE

    @property
    def ready(self) -> bool:
        """Whether steps can be applied without computing them."""
        return self.settled and bool(self.step())

    def _end(self) -> None:
        """A step has all its buckets."""
        self._steps += 1
        if self._steps == 1 and not self._numbers:  # of a state that was never attached
            self.compare(share.parameter for bucket in self._buckets.values() for share in bucket.shares)
        self._alike = 1 if self._changed else self._alike + 1
        self._changed = False

    def note(self, bucket: GradBucket) -> None:
        """Notes what ``bucket`` is made of, if that is not known yet."""
        index, buffer = bucket.index(), bucket.buffer()
        known = self._buckets.get(index)
        if self._steps < self._UNSETTLED or known is None or known.numel != buffer.numel():
            self._look(bucket, known)
        if bucket.is_last():
            for other in [i for i in self._buckets if i > index]:
                del self._buckets[other]
            self._end()

    def _look(self, bucket: GradBucket, known: Bucket | None) -> None:
        index, buffer = bucket.index(), bucket.buffer()
        start = buffer.storage_offset()
        shares = tuple(
            _Share(parameter, int(gradient.storage_offset() - start), _strides(parameter, gradient))
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        )
        if self._numbers and (strange := sum(not self.knows(share.parameter) for share in shares)):
            raise ConfigError(
                f"a bucket has {strange} parameter(s) that the model of this TailboundState has not: make one "
                "TailboundState for each model, or call register for each"
            )
        made = Bucket(
            index, buffer.numel(), buffer.dtype, bucket.is_last(), shares, buffer.device, self._digest(shares)
        )
        self._changed |= known is None or known.form != made.form
        self._buckets[index] = made

    def starts(self, index: int, numel: int) -> tuple[int, ...]:
        """Where the tensors of a bucket begin, as far as has been noted."""
        known = self._buckets.get(index)
        return known.starts if known is not None and known.numel == numel else ()

    def _digest(self, shares: Sequence[_Share]) -> str:
        told = [[self._numbers.get(id(s.parameter)), s.offset, tuple(s.parameter.shape), s.stride] for s in shares]
        return hashlib.blake2b(json.dumps(told).encode(), digest_size=8).hexdigest()

    def digest(self) -> bytes:
        """Of what the buckets of a step are made of; zeros while a whole one has not been seen."""
        told = [[b.index, b.numel, str(b.dtype), b.last, b.parts] for b in self.step()]
        return digest_of(json.dumps(told).encode()) if told else bytes(DIGEST)

    def step(self) -> Sequence[Bucket]:
        """The buckets of a step in order; empty while a whole one has not been seen."""
        buckets = [self._buckets[index] for index in sorted(self._buckets)]
        whole = [b.index for b in buckets] == list(range(len(buckets))) and [b.last for b in buckets[-1:]] == [True]
        whole &= not self._sparse
        return buckets if whole and not any(b.last for b in buckets[:-1]) else []


def _strides(parameter: torch.Tensor, gradient: torch.Tensor) -> tuple[int, ...]:
    """How a gradient lies in its bucket: as its parameter does, where that has no holes, though DDP tells otherwise."""
    return parameter.stride() if flat(parameter) is not None else gradient.stride()


@contextmanager
def gradients(
    buckets: Sequence[Bucket],
    averages: Sequence[torch.Tensor],
    unused: Collection[int] = (),
    others: Iterable[torch.Tensor] = (),
) -> Iterator[None]:
    """Within the context, ``.grad`` of all parameters is their part of ``averages``; after it, what it was.

    ``unused`` ones (by id) have none, as an optimizer moves by zeros, too. Nor have ``others``, which are in no bucket.
    """
    mine = [share.parameter for bucket in buckets for share in bucket.shares]
    before = [(parameter, parameter.grad) for parameter in (*mine, *others)]
    try:
        for parameter, _ in before:
            parameter.grad = None
        for bucket, average in zip(buckets, averages, strict=True):
            for share in bucket.shares:
                if id(share.parameter) in unused:
                    continue
                shape = share.parameter.shape
                part = average.as_strided(shape, share.stride, average.storage_offset() + share.offset)
                # a wrapper of the hook may have handed over another type (``fp16_compress_wrapper``)
                share.parameter.grad = part.to(share.parameter.dtype)
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient

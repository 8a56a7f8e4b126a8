"""Who turns a bucket into codes and results into an average: the host, or the device that the bucket lies on.

The engine needs three things of a bucket, in this order: what scales its groups need, where ranks agree on them for a
switch; its codes in packets; its average from the rows that came. ``Coder`` is these three, with the signatures of
``codec.encode`` and ``codec.decode``. Where values and average lie is the coder's business alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from tailbound.codec import decode as decoding
from tailbound.codec import encode as encoding
from tailbound.codec import feedback
from tailbound.codec.encode import Encoded
from tailbound.codec.halves import convert
from tailbound.codec.records import Coding
from tailbound.codec.shape import Shape

#: One-dimensional memory that a coder reads or writes: of ``codec.halves`` for the host, a tensor for a device.
Values: TypeAlias = Any


class Coder(Protocol):
    """Codes the ops of one launch; called in the transport thread.

    Nothing here waits for a device. All that is on the host is finished when a function returns. An ``average`` on a
    device may still be under way: the caller that hands it on waits for it.
    """

    #: Whether ``prepare`` is to be called as soon as the bucket may be read, also while ops before it are being sent.
    ahead: bool

    def warm_up(self, x: Values, out: Values, shape: Shape, coding: Coding) -> None:
        """Compiles what such an op takes, which may last seconds; in the thread that launches it."""

    def prepare(self, x: Values, shape: Shape, coding: Coding) -> Callable[[], bool]:
        """Gives the device what it has to do before ``measure`` and ``encode``.

        Returns:
            Says whether the device has done what it was given last for this op; only then the two are called.
        """

    @property
    def measure(self) -> Callable[..., bool]:
        """As ``codec.encode.measure``."""

    @property
    def encode(self) -> Callable[..., Encoded | None]:
        """As ``codec.encode.encode``; None: codes are under way, it is to be called again with the same arguments."""

    @property
    def decode(self) -> Callable[..., int]:
        """As ``codec.decode.decode``."""

    @property
    def write_residual(self) -> Callable[..., None]:
        """As ``codec.feedback.write_residual``."""

    def clear(self, average: Values) -> None:
        """Makes the average zero."""

    def keep(self, x: Values, average: Values) -> None:
        """Makes the own values the average."""


class HostCoder:
    """numpy memory, coded by the compiled passes."""

    ahead = False

    @staticmethod
    def warm_up(x: Values, out: Values, shape: Shape, coding: Coding) -> None:
        """The compiled passes are warm before the first op (``collective.warmup``)."""

    @staticmethod
    def prepare(x: Values, shape: Shape, coding: Coding) -> Callable[[], bool]:
        """There is nothing to wait for."""
        return lambda: True

    measure = staticmethod(encoding.measure)
    encode = staticmethod(encoding.encode)
    decode = staticmethod(decoding.decode)
    write_residual = staticmethod(feedback.write_residual)

    @staticmethod
    def clear(average: Values) -> None:
        """Makes the average zero."""
        average[:] = 0

    @staticmethod
    def keep(x: Values, average: Values) -> None:
        """Makes the own values the average."""
        convert(x, average)


HOST = HostCoder()

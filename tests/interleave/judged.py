"""The kernel program against the udp datapath: one transition of every kind that exploring has seen."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import pytest

from interleave.explorer import EVERY_DAY, Kind, Step, explored
from interleave.kernel import KernelTables
from interleave.scene import Action
from tailbound.wire.schema import UNKNOWN_SENDER, Verdict


@contextlib.contextmanager
def needs_pieces() -> Iterator[None]:
    """Skips where the kernel cannot run programs on frames in pieces."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pytest.skip("missing capability 'test runs of frames in pieces': needs Linux 6.18")


def kinds(scene: str, most: int) -> dict[Kind, tuple[bytes, Action, Step]]:
    """One transition of every kind that is seen in the first ``most`` states."""
    return explored(scene, most).kinds


def check_kinds(tables: KernelTables, scene: str, most: int) -> None:
    """The same verdict, the same charges, the same events, the same bytes; times aside.

    Raises:
        AssertionError: the kernel program does something else.
    """
    layout = tables.layout
    for state, action, step in kinds(scene, most).values():
        tables.put(state)
        gained, events = tables.do(action)
        where = f"{scene}: {action.name}: {step.verdict!r}; the kernel"
        assert sorted(gained) == sorted(step.gained), f"{where} counts {gained}"
        assert events == step.events, f"{where} says {events}"
        after, wanted = layout.timeless(tables.take()), layout.timeless(step.state)
        assert after == wanted, f"{where} has other {sorted(layout.changed(wanted, after))}"


def check_in_pieces(tables: KernelTables) -> None:
    """A frame of which the driver hands over the headers apart is counted as that in every state, and does nothing.

    Raises:
        AssertionError: it is not counted, or does something.
    """
    for linear in (0, 14, 106):
        for state, action, _ in kinds("records", EVERY_DAY["records"]).values():
            if not action.packet:
                continue
            tables.put(state)
            gained, events = tables.do(action, linear)
            counted = ((UNKNOWN_SENDER, Verdict.NOT_LINEAR),)
            assert gained == counted, f"{action.name} in pieces: counted as {gained}"
            assert events == ()
            assert tables.layout.timeless(tables.take()) == tables.layout.timeless(state), (linear, action.name)

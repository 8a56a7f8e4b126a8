"""Golden packets: bytes written down once, which every implementation of the wire format must read and make alike.

``unit/golden/packets.json`` was generated once and is never made anew: a change of the format adds a version and new
packets. numpy, plain integers and (in tests/kernel) the C code are held against it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

_FILE = Path(__file__).parents[1] / "unit" / "golden" / "packets.json"


class Golden(NamedTuple):
    """One packet: all its header fields (f32 as the float it is), its payload, and the bytes of both."""

    name: str
    fields: dict[str, int | float]
    header: bytes
    payload: bytes

    @property
    def data(self) -> bytes:
        """The whole UDP payload."""
        return self.header + self.payload

    @property
    def check(self) -> int:
        """The value of the check field."""
        return int(self.fields["check"])


@functools.cache
def golden_packets() -> tuple[Golden, ...]:
    """All golden packets, in the order of the file."""
    return tuple(
        Golden(p["name"], p["fields"], bytes.fromhex(p["header"]), bytes.fromhex(p["payload"]))
        for p in json.loads(_FILE.read_text())
    )

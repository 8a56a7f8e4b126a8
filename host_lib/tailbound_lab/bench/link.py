"""How many bytes have crossed a worker's link, both ways, as its interface counts them."""

from __future__ import annotations

import os
from pathlib import Path

#: Of the calling process's network namespace.
_TABLE = Path("/proc/self/net/dev")
_RECEIVED, _SENT = 0, 8


def link_bytes(interface: str | None = None, table: Path = _TABLE) -> int | None:
    """Bytes received and sent over ``interface`` (default: ``TAILBOUND_INTERFACE``) since it is there.

    Returns:
        None where no interface is named, or it is not there: on loopback nothing tells the ranks' bytes apart.
    """
    name = interface or os.environ.get("TAILBOUND_INTERFACE")
    for line in table.read_text().splitlines() if name else ():
        found, _, numbers = line.partition(":")
        if found.strip() == name:
            columns = [int(number) for number in numbers.split()]
            return columns[_RECEIVED] + columns[_SENT]
    return None

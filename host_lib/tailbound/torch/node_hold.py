"""Who holds on a host (clock-16): a rank that evaluates alone keeps its neighbours waiting, so their jobs hold, too.

Neighbours are in another job each, and wait in a collective. So they are told beside both: over datagram sockets with
names of the machine's, in a thread of their own. Ranks in containers of their own do not find each other: then nobody
is told.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

#: Seconds for a datagram to a neighbour: its thread does nothing else than read them.
_PATIENCE = 1.0
#: Of a datagram: a place, and whether it holds.
_BYTES = 2


class Holds:
    """This rank's hold and those of its neighbours, as one.

    Args:
        name: of the host's ranks, which no others on the machine have.
        place: of this rank on its host.
        places: ranks there.
        changed: called, by whatever thread, with whether one of them holds, where that is not what it was.
    """

    def __init__(self, name: str, place: int, places: int, changed: Callable[[bool], None]) -> None:
        self._place, self._changed = place, changed
        self._addresses = [f"\0{name}/{other}" for other in range(places)]
        self._holding, self._lock, self._told = set[int](), threading.Lock(), False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._closed = False
        self._socket.bind(self._addresses[place])
        self._thread = threading.Thread(target=self._hear, name="tailbound-hold", daemon=True)
        self._thread.start()

    def set(self, on: bool) -> None:
        """This rank holds, or no longer."""
        self._note(self._place, on)
        for other, address in enumerate(self._addresses):
            if other != self._place:
                self._send(bytes([self._place, on]), address)

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes it
        self._thread.join(_PATIENCE)
        self._socket.close()

    def _send(self, words: bytes, address: str) -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.settimeout(_PATIENCE)
            out.sendto(words, address)

    def _hear(self) -> None:
        while True:
            try:
                words = self._socket.recv(_BYTES + 1)
            except OSError:  # closed
                return
            if self._closed:
                return
            # any process of the machine can send here: what no neighbour sends is nothing
            if len(words) == _BYTES and words[0] != self._place and words[0] < len(self._addresses) and words[1] <= 1:
                self._note(words[0], bool(words[1]))

    def _note(self, place: int, on: bool) -> None:
        with self._lock:
            (self._holding.add if on else self._holding.discard)(place)
            if bool(self._holding) != self._told:
                self._told = not self._told
                self._changed(self._told)

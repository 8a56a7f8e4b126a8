"""The output of several processes, line by line, each line with its rank in front."""

from __future__ import annotations

import codecs
import os
import selectors
from typing import IO

from rich.console import Console
from rich.text import Text

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
_CHUNK = 65536


class LineSplitter:
    """Bytes in, whole lines of text out, without their ends; what is not UTF-8 is replaced."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """Lines that ``data`` completes."""
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        return [_last_version(line) for line in lines]

    def finish(self) -> list[str]:
        """The last line, if it had no end."""
        rest, self._rest = self._rest + self._decoder.decode(b"", final=True), ""
        return [_last_version(rest)] if rest else []


def _last_version(line: str) -> str:
    """What a terminal would show of a line that was written over with carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2]


class Streams:
    """Reads pipes and writes their lines to two consoles; ``ranks`` is how many there are, for the prefix's width."""

    def __init__(self, ranks: int, out: Console, err: Console) -> None:
        self._width = len(str(ranks - 1))
        self._out, self._err = out, err
        self._selector = selectors.DefaultSelector()
        self._files: dict[int, IO[bytes]] = {}

    def add(self, rank: int, stream: IO[bytes], *, error: bool) -> None:
        """Read ``stream`` from now on, and close it at its end."""
        os.set_blocking(stream.fileno(), False)
        self._files[stream.fileno()] = stream
        self._selector.register(
            stream.fileno(), selectors.EVENT_READ, (rank, self._err if error else self._out, LineSplitter())
        )

    @property
    def open(self) -> bool:
        """Whether any pipe is still open."""
        return bool(self._files)

    def pump(self, timeout: float) -> None:
        """Write what has come; wait for at most ``timeout`` seconds."""
        for key, _ in self._selector.select(timeout):
            rank, console, lines = key.data
            try:
                data = os.read(key.fd, _CHUNK)
            except BlockingIOError:
                continue
            self._write(rank, console, lines.feed(data) if data else lines.finish())
            if not data:
                self._selector.unregister(key.fd)
                self._files.pop(key.fd).close()

    def close(self) -> None:
        """Stop reading and close what is still open."""
        self._selector.close()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write(self, rank: int, console: Console, lines: list[str]) -> None:
        colour = _COLOURS[rank % len(_COLOURS)]
        for line in lines:
            text = Text.assemble((f"[{rank:>{self._width}}] ", colour))
            text.append_text(Text.from_ansi(line))
            console.print(text, soft_wrap=True, highlight=False, markup=False)

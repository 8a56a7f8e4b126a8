"""bmv2's ``simple_switch``: a process of this one, or one that outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tailbound.errors import AttachError, CapabilityError
from tailbound.switch.p4.tools import SWITCH, tool

THRIFT_PORT = 9090
#: Seconds until a switch must answer.
PATIENCE = 30.0
_POLL = 0.02
_LOG_TAIL = 400


class Process:
    """A running switch. It belongs to the network namespace of the thread that starts it, whose loopback must be up.

    Args:
        program: compiled (``compile_switch``).
        ports: port number -> interface.
        thrift_port: where it takes commands.
        folder: an empty one for its files; the switch then outlives this process, and ``close`` leaves it. None: one of
            its own, and it ends with ``close``.

    Raises:
        CapabilityError: ``simple_switch`` is missing.
        AttachError: it ends, or does not answer.
    """

    def __init__(
        self, program: bytes, ports: Mapping[int, str], thrift_port: int = THRIFT_PORT, folder: Path | None = None
    ) -> None:
        binary = tool(SWITCH)
        self._own = own = None if folder else tempfile.TemporaryDirectory(prefix="tailbound-p4-")
        where = folder or Path(own.name if own else "")
        path, self._log = where / "tailbound.json", where / "log"
        path.write_bytes(program)
        interfaces = [word for number, name in ports.items() for word in ("-i", f"{number}@{name}")]
        command = [binary, *interfaces, "--thrift-port", str(thrift_port), "--log-level", "off", str(path)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=where,
                start_new_session=folder is not None,
            )
        try:
            self._wait(thrift_port)
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """Of the switch."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the switch, unless it outlives this process; may be called twice."""
        if self._own is not None:
            self.end()
        elif self.alive():
            self._process.returncode = 0  # not this process's to wait for: else Popen warns that it still runs

    def end(self) -> None:
        """Ends the switch; may be called twice."""
        if self.alive():
            self._process.kill()
        self._process.wait()
        if self._own is not None:
            self._own.cleanup()

    def _wait(self, port: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.alive() and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return
            time.sleep(_POLL)
        said = self._log.read_text(errors="replace")[-_LOG_TAIL:].strip()
        ended = "does not answer" if self.alive() else f"ended with status {self._process.returncode}"
        raise AttachError(
            f"simple_switch {ended} (thrift port {port}; is that taken, and are you root?): {said or 'it said nothing'}"
        )


def born(pid: int) -> int | None:
    """When a process began, in ticks since boot: with its id a name that no other process has. None: it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *words = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(words[18])


@dataclass(frozen=True)
class Found:
    """A switch that another process has started; see ``born``."""

    pid: int
    born: int

    def alive(self) -> bool:
        """Whether it runs."""
        return born(self.pid) == self.born

    def close(self) -> None:
        """Leaves it as it is."""

    def end(self) -> None:
        """Ends it; returns when it is gone.

        Raises:
            CapabilityError: no privilege to.
        """
        try:
            while self.alive():
                os.kill(self.pid, signal.SIGKILL)
                time.sleep(_POLL)
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise CapabilityError(f"simple_switch, process {self.pid}, may not be ended: run as root") from error

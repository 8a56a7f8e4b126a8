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


def born(pid: int) -> int | None:
    """When a process began, in ticks since boot: with its id a name that no other process has. None: it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *words = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(words[18])


@dataclass(frozen=True)
class Process:
    """A running switch, of this process or of another one.

    Attributes:
        pid, born: see ``born``.
        own: its files, if it is to end with ``close``.
    """

    pid: int
    born: int | None
    own: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def start(
        cls, program: bytes, ports: Mapping[int, str], thrift_port: int = THRIFT_PORT, folder: Path | None = None
    ) -> Process:
        """Starts one in the network namespace of this thread, whose loopback must be up.

        Args:
            program: compiled (``compile_switch``).
            ports: port number -> interface.
            thrift_port: where it takes commands.
            folder: an empty one for its files; the switch then outlives this process, and ``close`` leaves it. None:
                one of its own, and it ends with ``close``.

        Raises:
            CapabilityError: ``simple_switch`` is missing.
            AttachError: it ends, or does not answer.
        """
        binary = tool(SWITCH)
        own = None if folder else tempfile.TemporaryDirectory(prefix="tailbound-p4-")
        where = folder or Path(own.name if own else "")
        path, log = where / "tailbound.json", where / "log"
        path.write_bytes(program)
        interfaces = [word for number, name in ports.items() for word in ("-i", f"{number}@{name}")]
        command = [binary, *interfaces, "--thrift-port", str(thrift_port), "--log-level", "off", str(path)]
        with log.open("wb") as out:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=where, start_new_session=own is None
            )
        made = cls(child.pid, born(child.pid), own)
        try:
            _wait(child, thrift_port, log)
        except BaseException:
            made.end()
            raise
        finally:
            child.returncode = child.returncode or 0  # ``end`` waits for it: else Popen warns that it still runs
        return made

    def alive(self) -> bool:
        """Whether it runs."""
        return self.born is not None and born(self.pid) == self.born

    def close(self) -> None:
        """Ends the switch, unless it outlives this process; may be called twice."""
        if self.own is not None:
            self.end()

    def end(self) -> None:
        """Ends the switch; returns when it is gone, and may be called twice.

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
        with contextlib.suppress(ChildProcessError):  # it is another's
            os.waitpid(self.pid, os.WNOHANG)
        if self.own is not None:
            self.own.cleanup()


def _wait(child: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Returns when the switch takes commands."""
    deadline = time.monotonic() + PATIENCE
    while child.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(_POLL)
    said = log.read_text(errors="replace")[-_LOG_TAIL:].strip()
    ended = "does not answer" if child.returncode is None else f"ended with status {child.returncode}"
    raise AttachError(
        f"simple_switch {ended} (thrift port {port}: run as root, and choose a port that is free): "
        f"{said or 'it said nothing'}"
    )

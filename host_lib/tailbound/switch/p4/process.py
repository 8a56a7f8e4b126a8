"""bmv2's ``simple_switch``, a child of this process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tailbound.errors import AttachError
from tailbound.switch.p4.tools import SWITCH, tool

THRIFT_PORT = 9090
#: Seconds until a switch must answer.
PATIENCE = 30.0
_POLL = 0.02
_LOG_TAIL = 400


class Process:
    """A running switch, in the network namespace of the thread that starts it, whose loopback must be up.

    A signal to this process's group, such as Ctrl-C, does not reach it.

    Args:
        program: compiled (``compile_switch``).
        ports: port number -> interface.
        thrift_port: where it takes commands.

    Raises:
        CapabilityError: ``simple_switch`` is missing.
        AttachError: it ends, or does not answer.
    """

    def __init__(self, program: bytes, ports: Mapping[int, str], thrift_port: int = THRIFT_PORT) -> None:
        binary = tool(SWITCH)
        self._files = tempfile.TemporaryDirectory(prefix="tailbound-p4-")
        where = Path(self._files.name)
        path, log = where / "tailbound.json", where / "log"
        path.write_bytes(program)
        interfaces = [word for number, name in ports.items() for word in ("-i", f"{number}@{name}")]
        command = [binary, *interfaces, "--thrift-port", str(thrift_port), "--log-level", "off", str(path)]
        with log.open("wb") as out:
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=where, start_new_session=True
            )
        try:
            _wait(self._child, thrift_port, log)
        except BaseException:
            self.close()
            raise

    def alive(self) -> bool:
        """Whether it runs."""
        return self._child.poll() is None

    def wait(self) -> int:
        """Waits for its end; its exit status."""
        return self._child.wait()

    def close(self) -> None:
        """Ends the switch; returns when it is gone, and may be called twice."""
        self._child.kill()
        self._child.wait()
        self._files.cleanup()


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

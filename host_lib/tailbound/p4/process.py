"""bmv2's ``simple_switch`` as a process of this one."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tailbound.errors import AttachError
from tailbound.p4.tools import SWITCH, tool

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

    Raises:
        CapabilityError: ``simple_switch`` is missing.
        AttachError: it ends, or does not answer.
    """

    def __init__(self, program: bytes, ports: Mapping[int, str], thrift_port: int = THRIFT_PORT) -> None:
        binary = tool(SWITCH)
        self._folder = tempfile.TemporaryDirectory(prefix="tailbound-p4-")
        path, self._log = Path(self._folder.name) / "tailbound.json", Path(self._folder.name) / "log"
        path.write_bytes(program)
        interfaces = [word for number, name in ports.items() for word in ("-i", f"{number}@{name}")]
        command = [binary, *interfaces, "--thrift-port", str(thrift_port), "--log-level", "off", str(path)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder.name
            )
        try:
            self._wait(thrift_port)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the switch."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the switch; may be called twice."""
        if self.alive():
            self._process.kill()
        self._process.wait()
        self._folder.cleanup()

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

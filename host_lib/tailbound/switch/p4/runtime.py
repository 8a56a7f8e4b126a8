"""A conversation with a running ``simple_switch``, over the command line that comes with it.

Commands go in as text and answers come back as text: that interface is documented, and needs no generated bindings
here. The command line has no end mark for an answer, so each command is followed by one that it does not know; its
complaint about that is the mark.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterable
from multiprocessing.connection import wait

from tailbound.errors import AttachError
from tailbound.switch.p4.tools import RUNTIME, runtime_environment, tool

#: Seconds after which an answer is not expected any more.
PATIENCE = 30.0
_PROMPT = "RuntimeCmd: "
_FAILURES = re.compile(r"^(Error|Invalid|Could not|\*\*\*|Traceback|[\w.]*Exception|AssertionError).*", re.MULTILINE)


class Runtime:
    """One session. It belongs to the network namespace of the thread that opens it.

    Args:
        port: thrift port of the switch, on this host.

    Raises:
        CapabilityError: the command line is missing.
        AttachError: it does not reach the switch.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._marks = 0
        self._text = ""
        self._process = subprocess.Popen(
            [tool(RUNTIME), "--thrift-port", str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=runtime_environment(),
        )
        try:
            self.run("switch_info")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the session; may be called twice."""
        if self._process.poll() is None:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()

    def run(self, command: str) -> str:
        """The answer to a command.

        Raises:
            AttachError: the switch refuses it, or does not answer.
        """
        return self.run_all([command])[0]

    def run_all(self, commands: Iterable[str]) -> list[str]:
        """The answers to commands, sent at once.

        Raises:
            AttachError: as ``run``; the commands behind one that is refused have been carried out all the same.
        """
        listed = list(commands)
        marks = []
        sent = ""
        for command in listed:
            self._marks += 1
            marks.append(f"*** Unknown syntax: tailbound_{self._marks}\n")
            sent += f"{command}\ntailbound_{self._marks}\n"
        self._write(sent)
        answers = [self._until(mark) for mark in marks]
        for command, answer in zip(listed, answers, strict=True):
            if wrong := _FAILURES.search(answer):
                raise AttachError(
                    f"the switch at thrift port {self._port} refuses {command!r}: {wrong[0]} "
                    "(load this version's program)"
                )
        return answers

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def _until(self, mark: str) -> str:
        """What comes before ``mark``, prompts taken out."""
        assert self._process.stdout is not None
        fd, deadline = self._process.stdout.fileno(), time.monotonic() + PATIENCE
        while mark not in self._text:
            ready = wait([fd], max(0.0, deadline - time.monotonic()))
            data = os.read(fd, 1 << 16) if ready else b""
            if not data:
                raise self._gone()
            self._text += data.decode(errors="replace")
        answer, _, self._text = self._text.partition(mark)
        return answer.replace(_PROMPT, "")

    def _gone(self) -> AttachError:
        """Ends the session; its last words are the reason."""
        assert self._process.stdout is not None
        self._process.kill()
        rest = self._process.stdout.read()
        said = (self._text + rest.decode(errors="replace")).strip().splitlines()
        return AttachError(
            f"no answer from a switch at thrift port {self._port}, start it: {said[-1] if said else 'no reason'}"
        )

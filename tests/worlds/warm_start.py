"""Commands in a lab that are forked from a process which has loaded already what all of them import.

A worker that trains takes 5 s of a core to import PyTorch, its compiler and Tailbound with its machine code. With
``warm_start`` what ``Cluster.popen`` would start comes out of one server instead: a child of its own for each command,
which goes through ``enter.main`` as ever (namespace, mounts, end of the parent) and then runs the command's module,
code or script where it would have become a new interpreter. Callers get a ``subprocess.Popen`` like any other.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tailbound_lab.lab import enter

_PR_SET_CHILD_SUBREAPER = 36
_SERVER = Path(__file__).with_name("warm_server.py")
_libc = ctypes.CDLL(None, use_errno=True)


class Server:
    """The process that commands are forked from; it starts with the first of them, if not before."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> socket.socket:
        """Starts it, once; the connection to it."""
        if self._socket is None:
            self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            # as in every worker of a lab; what is loaded reads it once
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            with there:
                self._process = subprocess.Popen(
                    [sys.executable, str(_SERVER), str(there.fileno())], env=environment, pass_fds=(there.fileno(),),
                    stdin=subprocess.DEVNULL, process_group=0,
                )  # fmt: skip
        return self._socket

    def fork(self, argv: list[str], env: dict[str, str], cwd: str, fds: dict[int, int], group: int) -> int:
        """Process id of a new child of this process that is what ``exec`` of ``argv`` would have made of it.

        Args:
            argv: a command, or ``enter.py`` and what follows it.
            env: all variables.
            cwd: working folder.
            fds: descriptors here by their numbers there.
            group: as ``process_group`` of ``subprocess.Popen``.
        """
        order = json.dumps({"argv": argv, "env": env, "cwd": cwd, "numbers": list(fds), "group": group}).encode()
        connection = self.start()
        # the child's own parent ends at once; so it becomes this process's, which is to wait for it
        _adopt(True)
        try:
            # an order may be longer than a packet of a socket takes
            read, write = os.pipe()
            with open(write, "wb") as pipe:
                with open(read, "rb", buffering=0):
                    socket.send_fds(connection, [b"fork"], [read, *fds.values()])
                pipe.write(order)
            pid = int(connection.recv(64) or b"0")
        finally:
            _adopt(False)
        if not pid:
            raise OSError("the server that commands are forked from has ended")
        return pid

    def close(self) -> None:
        """Ends the server; children of it that still run are let alone."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()


def _adopt(on: bool) -> None:
    """Whether orphans of children become children of this process."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot adopt orphans")


def popen_from(server: Server) -> type[subprocess.Popen[Any]]:
    """``subprocess.Popen`` whose commands are forked from ``server``: those of a lab, and Python's."""

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def _execute_child(self, *arguments: Any) -> None:
            plain = super()._execute_child  # type: ignore[misc]
            given = inspect.signature(plain).bind(*arguments).arguments
            argv = list(given["args"])
            group = given["process_group"]
            standard = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
            fds = {number: number if fd == -1 else fd for number, fd in enumerate(standard)}
            fds |= {fd: fd for fd in given["pass_fds"]}
            begin = argv.index(enter.__file__) if enter.__file__ in argv else 0
            env = dict(os.environ if given["env"] is None else given["env"])
            self.pid = server.fork(argv[begin:], env, os.fspath(given["cwd"] or os.getcwd()), fds, group)
            self._child_created = True
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]

    return Popen

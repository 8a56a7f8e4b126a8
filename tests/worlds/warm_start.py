"""Commands in a lab that are forked from a process which has loaded already what all of them import.

A worker that trains takes 5 s of a core to import PyTorch, its compiler and Tailbound with its machine code. With
``warm_start`` what ``Cluster.popen`` would start comes out of one server instead, which is this file run as a program:
a child of its own for each command, which goes through ``enter.main`` as ever (namespace, mounts, end of the parent)
and then runs the command's module, code or script where it would have become a new interpreter. Callers get a
``subprocess.Popen`` like any other. The server calls no torch operation: threads of OpenMP and of autograd do not
survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from tailbound_lab.lab import enter

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
#: Modules that workers of benchmarks and of the demo are.
_MAIN = ("tailbound_lab.bench.contest", "tailbound_lab.bench.course")
#: What workers of benchmarks, of the demo and of the tests' own jobs import; what is not installed they do without.
_LOADED = (
    "torch._dynamo", "torch._functorch.aot_autograd", "torch.nn.parallel", "sklearn.datasets",
    "sklearn.model_selection", "tailbound.torch.fsdp", *_MAIN,
    "tailbound_lab.lab.launch", "fsdp_jobs", "torch_jobs", "lab_team",
)  # fmt: skip
#: Descriptors are moved out of the way before they get their numbers.
_BEYOND = 200


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
                    [sys.executable, __file__, str(there.fileno())], env=environment, pass_fds=(there.fileno(),),
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


# -- the server -------------------------------------------------------------------------------------------------------


class _Exec(BaseException):
    """Where ``enter.main`` would have become another program."""


def load() -> None:
    """Modules, and the machine code of the codec and of the collective."""
    for name in _LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in _MAIN:
        sys.modules.pop(name, None)  # a main module is not one that has been imported before
    with contextlib.suppress(Exception):  # where jobs cannot run, the tests say why
        from tailbound import prepare

        prepare.compile_all()
    gc.freeze()  # what is never looked at by the collector stays shared with the children


def serve(connection: socket.socket) -> None:
    """Forks until the other end is closed; returns in children, too, where the command has been run."""
    while True:
        word, fds, _, _ = socket.recv_fds(connection, 16, 64)
        if not word:
            return
        with open(fds[0]) as file:
            order = json.load(file)
        read, write = os.pipe()
        middle = os.fork()
        if middle:
            os.close(write)
            os.waitpid(middle, 0)  # so that the child is an orphan when it is told of
            with open(read, "rb") as pipe:
                connection.send(pipe.read(64))
            for fd in fds[1:]:
                os.close(fd)
            continue
        middle = os.getpid()
        if child := os.fork():
            os.write(write, str(child).encode())
            os._exit(0)
        for fd in (read, write):
            os.close(fd)
        connection.close()
        while os.getppid() == middle:  # until whoever has ordered it is its parent
            time.sleep(0.0002)
        _begin(order, fds[1:])
        return


def _begin(order: dict[str, Any], fds: Sequence[int]) -> None:
    """What happens between fork and exec, and then the command, in this very interpreter."""
    # not that of the server: what a terminal sends is for whoever has ordered it
    os.setpgid(0, order["group"] if order["group"] >= 0 else os.getpgid(os.getppid()))
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _BEYOND) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, order["numbers"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ |= order["env"]
    os.chdir(order["cwd"])
    for number, mode, name in ((0, "r", "stdin"), (1, "w", "stdout"), (2, "w", "stderr")):
        buffering = 1 if mode == "w" and (number == 2 or os.environ.get("PYTHONUNBUFFERED")) else -1
        setattr(sys, name, open(number, mode, buffering=buffering, closefd=False))  # noqa: SIM115
    if order["argv"][0] != enter.__file__:
        _run(order["argv"])
        return
    become, command = os.execvp, []

    def here(_: str, words: Sequence[str]) -> NoReturn:
        command[:] = words
        raise _Exec

    os.execvp = here
    try:
        sys.exit(enter.main(order["argv"][1:]))
    except _Exec:
        os.execvp = become
    _run(command)


def _run(command: list[str]) -> None:
    """``python -m MODULE``, ``python -c CODE`` or ``python SCRIPT``; anything else is another program."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as every interpreter does when it starts
    if command[0] != sys.executable or len(command) < 2:
        os.execvp(command[0], command)
    kind, *rest = command[1:]
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif not kind.startswith("-"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")
    else:
        os.execvp(command[0], command)


def _end(status: int) -> NoReturn:
    """As an interpreter ends, but for taking apart what it has loaded: half a second for PyTorch."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    load()
    try:
        serve(socket.socket(fileno=int(sys.argv[1])))
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise
        _end(error.code or 0)
    _end(0)

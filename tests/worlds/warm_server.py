"""The server of ``warm_start``: loads what workers import, and forks one for every order.

No torch operation is called here: threads of OpenMP and of autograd do not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from tailbound_lab.lab import enter

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

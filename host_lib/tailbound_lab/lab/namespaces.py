"""Network namespaces by name, made and entered by threads.

A namespace is entered per thread, so nothing here forks: a process that has torch's or numba's threads
may build a lab, and its main thread never leaves its own network. Namespaces are bound under
``/run/netns`` as ``ip netns`` does, so that ``ip netns exec NAME ...`` works for whoever looks at a lab.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tailbound.errors import CapabilityError
from tailbound_lab.lab import enter
from tailbound_lab.lab.signals import held

T = TypeVar("T")

RUN_DIRECTORY = Path("/run/netns")
_MS_SHARED = 1 << 20


def path(name: str) -> Path:
    """Where the namespace ``name`` is bound."""
    return RUN_DIRECTORY / name


def exists(name: str) -> bool:
    """Whether ``name`` is bound."""
    return path(name).exists()


def names(prefix: str) -> list[str]:
    """Names of bound namespaces that begin with ``prefix``, sorted."""
    try:
        return sorted(entry for entry in os.listdir(RUN_DIRECTORY) if entry.startswith(prefix))
    except FileNotFoundError:
        return []


def _share_run_directory() -> None:
    """As ``ip netns add`` does: unmounts must reach processes that live in other mount namespaces."""
    RUN_DIRECTORY.mkdir(parents=True, exist_ok=True)
    try:
        enter.mount("none", str(RUN_DIRECTORY), "none", _MS_SHARED | enter.MS_REC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        enter.mount(str(RUN_DIRECTORY), str(RUN_DIRECTORY), "none", enter.MS_BIND | enter.MS_REC)
        enter.mount("none", str(RUN_DIRECTORY), "none", _MS_SHARED | enter.MS_REC)


def _thread(target: Callable[[], T], *, patient: bool) -> T:
    """Run ``target`` in a thread of its own; ``patient``: an interrupt waits until it is done."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(target())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body, name="lab-namespace", daemon=True)
    with held() if patient else contextlib.nullcontext():
        thread.start()
        thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def create(name: str) -> None:
    """Make a network namespace and bind it as ``name``.

    Raises:
        CapabilityError: namespaces cannot be made here (not root, or the kernel refuses).
        FileExistsError: the name is taken.
    """

    def body() -> None:
        _share_run_directory()
        os.close(os.open(path(name), os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
        try:
            enter.new_network()
            enter.mount(f"/proc/self/task/{threading.get_native_id()}/ns/net", str(path(name)), "none", enter.MS_BIND)
        except BaseException:
            path(name).unlink()
            raise

    try:
        _thread(body, patient=True)
    except FileExistsError:
        raise
    except OSError as error:
        raise CapabilityError(
            f"cannot make network namespace {name}: {error}; the lab needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN)"
        ) from error


def remove(name: str) -> None:
    """Unbind ``name``; the kernel frees it when nobody is inside any more. No error if it is not there."""
    with contextlib.suppress(OSError):
        enter.unmount(str(path(name)), enter.MNT_DETACH)
    with contextlib.suppress(FileNotFoundError):
        path(name).unlink()


def call(name: str, function: Callable[..., T], *arguments: Any, patient: bool = False, sysfs: bool = False) -> T:
    """``function(*arguments)`` in a thread inside the namespace ``name``; its result or its exception.

    Sockets and BPF links made by it belong to the namespace and may be used from any thread afterwards.

    Args:
        patient: an interrupt of the waiting thread is raised only after the function returned.
        sysfs: give the thread a ``/sys`` of this namespace too (a few milliseconds).

    Raises:
        OSError: the namespace is not there or may not be entered.
    """

    def body() -> T:
        enter.enter_network(str(path(name)))
        if sysfs:
            enter.private_mounts()
        return function(*arguments)

    return _thread(body, patient=patient)


def write_sysctl(key: str, value: int | str) -> bool:
    """Write ``/proc/sys/KEY`` of the calling thread's namespace; False if this kernel has no such key."""
    try:
        Path("/proc/sys", key).write_text(f"{value}\n", encoding="ascii")
    except FileNotFoundError:
        return False
    return True


def processes(namespaces: list[str]) -> list[int]:
    """Process ids of whoever lives in one of these namespaces."""
    inodes = set()
    for name in namespaces:
        with contextlib.suppress(OSError):
            inodes.add(os.stat(path(name)).st_ino)
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}/ns/net").st_ino in inodes:
                    found.append(int(entry))
    return sorted(found)

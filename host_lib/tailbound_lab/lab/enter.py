"""Run a command inside a network namespace, with a ``/sys`` that shows that namespace's interfaces.

    python -I -S enter.py [--parent PID] [--hosts TEXT] NAMESPACE -- COMMAND [ARG ...]

A file of its own that imports nothing of the package, because it runs between fork and the real
command: it must start in a few milliseconds and must not fail when the command's own Python differs.
``--parent`` makes the kernel kill the command when that process dies, so that a killed launcher leaves
nobody behind. ``--hosts`` puts lines in front of ``/etc/hosts`` as the command sees it: there is no name
server in a lab, and rendezvous code asks for the names of addresses.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE, MNT_DETACH = 4096, 16384, 1 << 19, 2
PR_SET_PDEATHSIG = 1
#: Exit status when the namespace cannot be entered or the command not be found, as shells have it.
CANNOT_ENTER, NOT_FOUND = 126, 127

_HOSTS = "/etc/hosts"
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter_network(path: str) -> None:
    """Move the calling thread into the network namespace at ``path``.

    Raises:
        OSError: it does not exist, or the privilege (CAP_SYS_ADMIN) is missing.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(fd, CLONE_NEWNET), f"cannot enter {path}")
    finally:
        os.close(fd)


def new_network() -> None:
    """Move the calling thread into a new network namespace; OSError as ``enter_network``."""
    _check(_libc.unshare(CLONE_NEWNET), "cannot make a network namespace")


def mount(source: str, target: str, kind: str, flags: int) -> None:
    """mount(2), whose errno an OSError has."""
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)
    _check(result, f"cannot mount {source} on {target}")


def unmount(target: str, flags: int) -> None:
    """umount2(2), whose errno an OSError has."""
    _check(_libc.umount2(target.encode(), flags), f"cannot unmount {target}")


def private_mounts(hosts: str = "") -> None:
    """Give the calling thread a mount namespace whose ``/sys`` belongs to its network namespace.

    What was mounted below ``/sys`` (bpffs, cgroups, tracefs) is carried over: a program in the lab
    needs them and would not find them under the new mount. Unmounts outside still arrive here
    (slave propagation), so that namespaces can be removed while a command runs. OSError as ``enter_network``.
    """
    _check(_libc.unshare(CLONE_NEWNS), "cannot make a mount namespace")
    mount("none", "/", "none", MS_SLAVE | MS_REC)
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        points = [line.split()[4] for line in file]
    below = [point for point in points if point.startswith("/sys/")]
    # only the topmost ones: a recursive bind brings what lies below them
    tops = [p for p in below if not any(p != q and p.startswith(q + "/") for q in below)]
    kept = [(top, os.open(top, os.O_PATH | os.O_CLOEXEC)) for top in dict.fromkeys(tops)]
    if hosts:
        _replace_hosts(hosts)
    mount("sysfs", "/sys", "sysfs", 0)
    for top, fd in kept:
        if os.path.isdir(top):
            mount(f"/proc/self/fd/{fd}", top, "none", MS_BIND | MS_REC)
        os.close(fd)


def _replace_hosts(lines: str) -> None:
    """Bind a file over ``/etc/hosts``. It lives in a tmpfs that is mounted nowhere afterwards."""
    if not os.path.exists(_HOSTS):
        return
    with open(_HOSTS, encoding="utf-8", errors="surrogateescape") as file:
        text = f"{lines}\n{file.read()}"
    mount("tmpfs", "/sys", "tmpfs", 0)
    with open("/sys/hosts", "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    mount("/sys/hosts", _HOSTS, "none", MS_BIND)
    unmount("/sys", MNT_DETACH)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when ``parent``, which must be its parent, dies."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "cannot set the parent death signal")
    if os.getppid() != parent:
        os._exit(CANNOT_ENTER)


def main(argv: list[str]) -> int:
    """Enter and exec; returns only when that failed."""
    words, command = _split(argv)
    if not words or not command:
        print("enter: use enter.py [--parent PID] [--hosts TEXT] NAMESPACE -- COMMAND [ARG ...]", file=sys.stderr)
        return CANNOT_ENTER
    *pairs, namespace = words
    options = dict(zip(pairs[::2], pairs[1::2], strict=True))
    try:
        if "--parent" in options:
            die_with(int(options["--parent"]))
        enter_network(namespace)
        private_mounts(options.get("--hosts", ""))
    except (OSError, ValueError) as error:
        print(f"enter: {error}; the lab needs root (CAP_SYS_ADMIN)", file=sys.stderr)
        return CANNOT_ENTER
    # Python ignores SIGPIPE and the ignored state survives exec: the command must start as from a shell.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"enter: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and after the first ``--``."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

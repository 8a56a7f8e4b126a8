"""Start a command in a user namespace of its own, in which who is not root may build a lab.

    python -I -S user_namespace.py COMMAND [ARG ...]

A file of its own that imports nothing of the package, as ``enter.py``: a process with threads cannot change its user
namespace, so the command is started afresh, in the same process. Inside, the user is root over namespaces, veths,
bridges and queues that are made there, and over nothing else: bpf(2) still refuses, hence no XDP. The mounts are
private, and with the last process of the command everything in them is gone.

Where the kernel refuses, the command is started as it was, with the reason in ``REFUSED``.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from pathlib import Path

#: Why there is no user namespace, for the message of a lab that cannot be built.
REFUSED = "TAILBOUND_LAB_REFUSED"

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_SLAVE = 4096, 16384, 1 << 19
_RUN = "/run"
#: Map of the user namespace that a machine starts with.
_EVERYBODY = ["0", "0", "4294967295"]

_libc = ctypes.CDLL(None, use_errno=True)


def owned() -> bool:
    """Whether this process lives in another user namespace than the machine's first: nothing there may load BPF."""
    try:
        return Path("/proc/self/uid_map").read_text(encoding="ascii").split() != _EVERYBODY
    except OSError:
        return False  # a kernel without user namespaces


def restart() -> None:
    """Start this very command line again, in a user namespace; does not return.

    To be called before anything is done that would be done twice. Whether the kernel agreed shows in ``owned``.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, sys.executable, *sys.orig_argv[1:]])


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int) -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)
    _check(result, f"cannot mount {source} on {target}")


def _enter() -> None:
    """A user namespace in which this user is root, and a mount namespace with a /run to write to.

    Raises:
        OSError: the kernel refuses a step.
    """
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "cannot make a user namespace")
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1", encoding="ascii")
    _mount("none", "/", "none", _MS_SLAVE | _MS_REC)
    _own_run()


def _own_run() -> None:
    """A /run of our own, for the names of namespaces; what was in the old one is in it too."""
    old = os.open(_RUN, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    entries = [(name, os.stat(name, dir_fd=old, follow_symlinks=False).st_mode) for name in os.listdir(old)]
    _mount("tmpfs", _RUN, "tmpfs", 0)
    for name, mode in entries:
        source, target = f"/proc/self/fd/{old}/{name}", f"{_RUN}/{name}"
        if name == "netns":
            continue
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(name, dir_fd=old), target)
            continue
        if stat.S_ISDIR(mode):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
        _mount(source, target, "none", _MS_BIND | _MS_REC)
    os.close(old)


def _refused() -> str | None:
    """Tries it in a child, so that a refusal half-way leaves this process as it was; why it was refused."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _enter()
        except OSError as error:
            os.write(write, (error.strerror or str(error)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        words = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    return words or None


def main(command: list[str]) -> int:
    """Enter and exec; returns only when COMMAND cannot be started."""
    reason = _refused()
    if reason is None:
        _enter()
    else:
        os.environ[REFUSED] = reason
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

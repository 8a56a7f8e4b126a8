"""What every test shares: deterministic hypothesis, and skips that name the capability that is missing.

``@pytest.mark.needs("root", "bcc")`` says what a test cannot do without. With ``TAILBOUND_REQUIRE_ALL=1`` (continuous
integration) every skip, of whatever origin, is a failure, but for what ``NOT_EVERYWHERE`` has.

``pytest -n 2``, as ``make test`` does, runs tests in two processes, those in real time one after the other
(``_scope``).

``pytest --thorough`` runs what a marker of that name keeps out of the everyday run, too: the rest of a series of which
that has a few cases, whole benchmarks.

A test that fails while the machine stands still runs once more (``worlds/stalls.py``).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import importlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tailbound.doctor import facts
from tailbound.errors import CapabilityError, TailboundError
from tailbound.kernel import headers, syscalls

pytest_plugins = ["hangs", "stalls"]

REQUIRE_ALL = os.environ.get("TAILBOUND_REQUIRE_ALL") == "1"
REPOSITORY = Path(__file__).resolve().parents[1]

# A shell without job control has what it starts in the background ignore SIGINT, and children inherit that; tests
# interrupt themselves and what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton asks when it is imported, here or in what tests start, whether kernels are compiled or interpreted on the CPU.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Shared cores make single examples slow, and the same commit has to give the same answer.
settings.register_profile("tailbound", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("tailbound")


def _tools(*names: str) -> Callable[[], bool]:
    return lambda: all(shutil.which(name) for name in names)


def _module(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(name) is not None


def _cuda() -> bool:
    return _module("torch")() and importlib.import_module("torch").cuda.device_count() > 0


def _tcx() -> bool:
    """Whether the kernel knows TCX links (Linux 6.6): one is asked for on an interface that is nowhere."""
    nowhere, returns_zero = 0x7FFFFFFF, bytes.fromhex("b700000000000000 9500000000000000")
    try:
        program = syscalls.prog_load(returns_zero, name="tb_probe", kind=syscalls.PROG_TYPE_TC)
    except (OSError, TailboundError):
        return False
    try:
        syscalls.link_create(program, nowhere, 0, syscalls.ATTACH_TCX_EGRESS)
    except OSError as error:
        return error.errno == errno.ENODEV
    finally:
        os.close(program)
    return True


def _linux(*least: int) -> Callable[[], bool]:
    return lambda: tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= least


def _p4_runtime() -> bool:
    from tailbound.switch.p4 import tools

    with contextlib.suppress(CapabilityError):
        words, environment = [tools.tool(tools.RUNTIME), "--help"], tools.runtime_environment()
        return subprocess.run(words, env=environment, capture_output=True, check=False).returncode == 0
    return False


def _everybody() -> bool:
    """Whether another user may make a user namespace, and read this checkout."""
    if os.geteuid() != 0:
        return False
    script = REPOSITORY / "host_lib/tailbound_lab/lab/user_namespace.py"
    try:
        words = subprocess.run(
            [sys.executable, script, sys.executable, "-c", "print(open('/proc/self/uid_map').read())"],
            user=65534, group=65534, extra_groups=[], capture_output=True, text=True, check=False,
        ).stdout.split()  # fmt: skip
    except OSError:
        return False
    return words == ["0", "65534", "1"]


#: Capability -> (is it there, what to say where it is not).
CAPABILITIES: dict[str, tuple[Callable[[], bool], str]] = {
    "root": (lambda: os.geteuid() == 0, "run as root"),
    "netns": (lambda: facts.has_capability("CAP_SYS_ADMIN", "CAP_NET_ADMIN"), "CAP_SYS_ADMIN and CAP_NET_ADMIN"),
    "user namespaces": (_everybody, "run as root, in a folder others may read, where they may make user namespaces"),
    "bpf": (lambda: facts.bpf_error() is None, "a kernel and privileges that let this process use bpf(2)"),
    "tcx": (_tcx, "Linux 6.6: programs at tc egress by BPF link"),
    "veth backpressure": (_linux(6, 16), "Linux 6.16: a veth whose queue waits while its ring is full"),
    "8021q": (Path("/proc/net/vlan").exists, "a kernel with interfaces of VLANs: modprobe 8021q"),
    "bcc": (lambda: facts.bcc_path() is not None, "apt-get install python3-bpfcc"),
    "headers": (lambda: headers.source_tree() is not None, "apt-get install linux-headers-amd64"),
    "clang": (lambda: facts.clang_path() is not None, "apt-get install clang-14"),
    "libbpf": (lambda: Path("/usr/include/bpf/bpf_helpers.h").exists(), "apt-get install libbpf-dev"),
    "torch": (_module("torch"), "pip install 'tailbound[torch]'"),
    "CUDA device": (_cuda, "an NVIDIA GPU with its driver, and a build of torch for CUDA"),
    "triton": (_module("triton"), "pip install 'tailbound[test]'"),
    "expecttest": (_module("expecttest"), "pip install 'tailbound[test]'"),
    "scapy": (_module("scapy"), "pip install 'tailbound[test]'"),
    "sklearn": (_module("sklearn"), "pip install 'tailbound-lab[demo]'"),
    "matplotlib": (_module("matplotlib"), "pip install 'tailbound-lab[demo]'"),
    "prometheus": (_module("prometheus_client"), "pip install 'tailbound[prometheus]'"),
    "lightning": (_module("pytorch_lightning"), "pip install 'tailbound[examples]'"),
    "transformers": (_module("transformers"), "pip install 'tailbound[examples]'"),
    "accelerate": (_module("accelerate"), "pip install 'tailbound[examples]'"),
    "p4c": (_tools("p4c-bm2-ss"), "p4c-bm2-ss on PATH, built from p4c's sources"),
    "bmv2": (
        _tools("simple_switch", "simple_switch_CLI"),
        "simple_switch and its CLI on PATH, built from bmv2's sources",
    ),
    "thrift": (_p4_runtime, "simple_switch_CLI needs a Python with thrift: apt-get install python3-thrift"),
}
#: What continuous integration may lack: a device, what Debian 12's kernel 6.1 does not know or may be built without,
#: and the P4 tools, which are in no package registry.
NOT_EVERYWHERE = ("CUDA device", "tcx", "veth backpressure", "8021q", "p4c", "bmv2", "thrift")


@functools.cache
def missing(capability: str) -> str | None:
    """What to do for ``capability``, or None where it is there."""
    there, remedy = CAPABILITIES[capability]
    return None if there() else f"missing capability {capability!r}: {remedy}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run tests marked as thorough, too")


#: What the files import whose tests need time that passes: sockets, threads, jobs over loopback.
_REAL = re.compile(r"^(import|from) .*\b(socket|team|threading|time)\b", re.MULTILINE)
_SIMULATED = re.compile(r"^from sim\.", re.MULTILINE)


@functools.cache
def _scope(file: str) -> str:
    """What one process runs in one go, one test after the other: a file that only computes, or all of a kind in real
    time. Labs, torch's processes and loopback jobs each have the machine to themselves but for one other process.
    """
    folder = Path(file).parent.name
    if folder in ("netns", "torch", "p4"):
        return folder
    source = (REPOSITORY / file).read_text()
    return "real time" if _REAL.search(source) and not _SIMULATED.search(source) else file


#: What takes minutes, then what takes seconds a test: begun in this order, so that both processes end together.
_LONGEST = ("netns", "torch", "real time", "p4", "tests/sim/", "tests/unit/test_codec_error.py", "tests/kernel/")


def _turn(item: pytest.Item) -> int:
    scope = _scope(item.nodeid.partition("::")[0])
    return next((turn for turn, name in enumerate(_LONGEST) if scope.startswith(name)), len(_LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """By scopes, in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid.partition("::")[0])

    config.option.loadscopereorder = False  # by how many tests there are: the longest one may be alone in its file
    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--thorough"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("thorough")])
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)
    for item in items:
        for mark in item.iter_markers("needs"):
            for capability in mark.args:
                if reason := missing(capability):
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Compiles what whole jobs call before the first test begins: in a new checkout that takes most of its time limit.

    What has been compiled is loaded, which the tests would do anyway. Those of PyTorch leave that to their processes.
    And what has been imported is left out of garbage collections, which took a tenth of the time.
    """
    if session.config.option.collectonly or session.testsfailed:
        return
    torch = any(item.path.parent.name == "torch" for item in session.items)
    if "tailbound.collective.communicator" in sys.modules or (torch and not _compiled()):
        from tailbound import prepare

        with contextlib.suppress(Exception):  # where jobs cannot run, the tests say why
            prepare.compile_all()
    gc.collect()
    gc.freeze()


def _compiled() -> bool:
    """Whether numba has kept any machine code of this checkout."""
    return any((REPOSITORY / "host_lib/tailbound/codec/__pycache__").glob("*.nbi"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """A skip is a failure, where none is allowed; expected failures are not skips."""
    report = yield
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if reason not in {f"Skipped: {missing(name)}" for name in NOT_EVERYWHERE}:
            report.outcome = "failed"
            report.longrepr = f"skipped although TAILBOUND_REQUIRE_ALL=1: {reason}"
    return report


#: of whole files, too
pytest_make_collect_report = pytest_runtest_makereport


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout that the tests are in."""
    return REPOSITORY


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """A file with the key of a job, for its owner alone."""
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(bytes(range(32)))
    return path

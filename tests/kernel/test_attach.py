"""Attaching for real: a veth pair in namespaces of its own, packets through the stack, pins, strangers, leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest
from pyroute2 import IPRoute

import cases
import veths
from loaders import both_loaders
from support import await_that
from tailbound.datapath import xdp
from tailbound.datapath.select import open_datapath
from tailbound.datapath.xdp import XdpDatapath
from tailbound.datapath.xdp import attach as attach_for_good
from tailbound.errors import AttachError, ConfigError
from tailbound.kernel import barrier, linear, net, pin, syscalls
from tailbound.kernel.pin import Receiver
from tailbound.transport.config import Config
from tailbound.wire.schema import HEADER_BYTES, Event, PacketType, Verdict

pytestmark = pytest.mark.needs("netns")
SIZES = {"width": cases.WIDTH, "sum_rows": cases.SUM_ROWS, "result_rows": cases.RESULT_ROWS}


def activate(path: XdpDatapath) -> None:
    """Rank 0 of four, in the state of the cases."""
    path.reset(cases.FIRST_OP)
    path.store.peers[1] = (cases.address_of(1), 1, 0, 0)
    for name, value in cases.control_values().items():
        path.store.control[name][0] = value


def send(wire: list[str], *payloads: bytes) -> None:
    """From rank 1's namespace, by its stack."""
    veths.go(wire[1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.bind((cases.ip_of(1), cases.PORT))
        for payload in payloads:
            out.sendto(payload, (cases.ip_of(0), cases.PORT))
    veths.go(wire[0])


def stranger(command: list[str], group: int) -> subprocess.CompletedProcess[str]:
    """Runs a command as nobody in particular, in a home that holds nothing."""
    with tempfile.TemporaryDirectory() as home:
        os.chown(home, 12346, group)
        environment = os.environ | {"HOME": home}
        environment.pop("XDG_CACHE_HOME", None)
        return subprocess.run(
            command, user=12346, group=group, extra_groups=[], capture_output=True, text=True, env=environment
        )


def counted(path: XdpDatapath, packets: int) -> dict[Verdict, int]:
    """Verdicts once so many packets have come: veth delivers in softirq, at the latest when this thread sleeps."""
    verdicts = path.store.ledger["verdict"]
    await_that(lambda: verdicts.sum() >= packets, f"{packets} packets counted")
    return {Verdict(i): int(n) for i, n in enumerate(verdicts.sum(0)) if n}


def control_packets(path: XdpDatapath) -> list[bytes]:
    """Those that come next."""
    packets: list[bytes] = []
    await_that(lambda: packets.extend(path.source.words(2048)) or packets, "a control packet")
    return packets


def test_the_address_is_known_before_a_job(wire: list[str], loader: str) -> None:
    """Other addresses pass before any job has come, and a packet to this one is counted."""
    XdpDatapath.pin(Receiver("tbx", cases.PORT, **SIZES), loader)
    with contextlib.closing(XdpDatapath.open("tbx")) as path:
        assert int(path.store.control["address"][0]) == cases.address_of(0)
        send(wire, cases.ready())
        assert counted(path, 1) == {Verdict.INACTIVE: 1}


def exercise(path: XdpDatapath, wire: list[str]) -> None:
    """A contribution, a result, READY and rubbish; and a contribution to what is sealed."""
    activate(path)
    send(wire, cases.contribution(), cases.result(), cases.ready(), cases.flipped(cases.result(), 700))
    assert select.select(path.fds(), [], [], 20)[0]
    verdicts = {Verdict.STORED: 1, Verdict.RESULT_TAKEN: 1, Verdict.CONTROL_PASSED: 1, Verdict.CORRUPT: 1}
    assert counted(path, 4) == verdicts
    assert [kind for kind, _, _ in path.source.take()] == [Event.OPENED]
    assert path.source.take() == []
    assert control_packets(path) == [cases.ready()]
    assert path.store.slots["count"][cases.SEQ & 63] == 1
    assert path.store.results[cases.RESULT_SEQ & 127, : cases.CODES].tobytes() == cases.codes(101)
    path.source.seal(cases.OP, cases.SEQ, 2)
    send(wire, cases.contribution(seq=cases.SEQ + 1))
    assert counted(path, 5) == verdicts | {Verdict.LATE: 1}


def test_a_new_job_waits_for_packets_that_the_job_before_let_in(
    wire: list[str], loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kernel-9: they are through before slots are sealed, so none finds the rules of one job and a row of another."""
    done: list[str] = []
    with contextlib.closing(XdpDatapath.attach(Receiver("tbx", cases.PORT, **SIZES), loader)) as path:
        wait, seal = barrier.grace_period, path.source.seal
        monkeypatch.setattr(barrier, "grace_period", lambda: done.append("waited") or wait())
        monkeypatch.setattr(path.source, "seal", lambda *rows: done.append("sealed") or seal(*rows))
        path.reset(cases.FIRST_OP)
        assert done == ["waited", "sealed"]


def test_without_a_grace_period_from_the_kernel_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cores run without a tick membarrier(2) refuses what waits for all of them."""
    slept: list[float] = []
    monkeypatch.setattr(barrier.time, "sleep", slept.append)
    monkeypatch.setattr(barrier, "_NUMBER", -1)
    barrier.grace_period()
    assert slept == [barrier._LONG]


@both_loaders
def test_attach_in_process(wire: list[str], loader: str) -> None:
    with contextlib.closing(XdpDatapath.attach(Receiver("tbx", cases.PORT, **SIZES), loader)) as path:
        assert path.endpoint == (cases.ip_of(0), cases.PORT)
        assert net.xdp_on("tbx").mode == "native"  # type: ignore[union-attr]
        exercise(path, wire)
        with pytest.raises(AttachError, match="already carries Tailbound's tb_worker"):
            XdpDatapath.attach(Receiver("tbx", cases.PORT + 1, **SIZES), loader)
        for array in (path.store.sums, path.store.slots, path.store.ops, path.store.ledger):
            assert not array.flags.writeable
    path.close()
    assert net.xdp_on("tbx") is None


def test_a_closed_datapath_has_no_descriptor_left(wire: list[str]) -> None:
    """Also where somebody still holds its arrays, as a job does until the garbage collector has found it."""
    XdpDatapath.attach(Receiver("tbx", cases.PORT, **SIZES)).close()  # what is opened once for all is open now
    before = len(os.listdir("/proc/self/fd"))
    path = XdpDatapath.attach(Receiver("tbx", cases.PORT, **SIZES))
    store = path.store
    path.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not store.control["ranks"][0]


@both_loaders
def test_pinned(wire: list[str], loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned by one object, used by another, and gone after detach; one that is half open leaves nothing open."""
    assert not pin.settings("tbx")
    with pytest.raises(AttachError, match="nothing is attached"):
        XdpDatapath.open("tbx")
    XdpDatapath.pin(Receiver("tbx", cases.PORT, **SIZES), loader)
    assert pin.settings("tbx")
    path = XdpDatapath.open("tbx")
    exercise(path, wire)
    path.close()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(xdp.Fanout, "stop", None)
    with pytest.raises(TypeError):
        XdpDatapath.open("tbx")
    assert len(os.listdir("/proc/self/fd")) == before
    assert net.xdp_on("tbx") is not None
    with pytest.raises(AttachError, match="tailbound detach tbx"):
        XdpDatapath.attach(Receiver("tbx", cases.PORT, **SIZES), loader)
    assert pin.remove("tbx")
    assert net.xdp_on("tbx") is None
    assert not pin.remove("tbx")


def test_nothing_of_a_job_is_left_in_pinned_maps(wire: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No packet is let in for it, no tag is asked for, and no key lies there (kernel-5)."""
    XdpDatapath.pin(Receiver("tbx", cases.PORT, **SIZES))
    keys: dict[int, bool] = {}
    put = xdp.put_key

    def noted(fd: int, epoch: int, key: np.ndarray) -> None:
        keys[epoch % 2] = bool(key.any())
        put(fd, epoch, key)

    monkeypatch.setattr(xdp, "put_key", noted)
    path = XdpDatapath.open("tbx")
    activate(path)
    for epoch, key in enumerate(cases.KEYS):
        path.put_key(epoch, key)
    assert keys == {0: True, 1: True}
    path.store.control["tagged"] = 1
    control = path.store.control
    path.close()
    assert (control["active"][0], control["tagged"][0], keys) == (0, 0, {0: False, 1: False})
    control["active"], control["tagged"] = path.active, 1  # as after kill -9
    keys.clear()
    XdpDatapath.open("tbx").close()
    assert (control["active"][0], control["tagged"][0], keys) == (0, 0, {0: False, 1: False})


def test_a_job_whose_process_is_gone_has_ended(wire: list[str], loader: str) -> None:
    """It can say nothing more, but the kernel has closed its socket; one that is only stopped has it (kernel-5)."""
    XdpDatapath.pin(Receiver("tbx", cases.PORT, **SIZES), loader)
    with contextlib.closing(XdpDatapath.open("tbx")) as path:
        activate(path)
        path.store.control["active"] = path.active
        send(wire, cases.contribution(), cases.ready())
        assert counted(path, 2) == {Verdict.STORED: 1, Verdict.CONTROL_PASSED: 1}
        path.socket.close()
        send(wire, cases.control_packet(PacketType.PROBE), cases.contribution(2))
        assert counted(path, 4)[Verdict.INACTIVE] == 2
        assert not path.store.control["active"][0]


def test_control_packets_past_the_program_are_held_against_their_senders(wire: list[str]) -> None:
    """By loopback, which has no program: only the kernel's own list says who may send (kernel-8)."""
    with contextlib.closing(XdpDatapath.attach(Receiver("tbx", cases.PORT, **SIZES))) as path:
        activate(path)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            for data in (cases.ready(), cases.ready()[:20]):
                other.sendto(data, path.endpoint)
        assert path.source.words(2048) == []
        assert path.lost_on_arrival == {"strange_source": 2}
        send(wire, cases.ready())
        assert control_packets(path) == [cases.ready()]


def test_a_job_goes_round_in_as_much_of_the_sums_ring_as_it_needs(wire: list[str]) -> None:
    """Pinned for two ranks, used by four: program and host agree on the slot, and the rest of the ring stays cold."""
    XdpDatapath.pin(Receiver("tbx", cases.PORT, cases.WIDTH, 256, 256))
    with contextlib.closing(XdpDatapath.open("tbx", 4)) as path:
        assert path.store.sum_rows == path.store.slots.size == len(path.store.sums) == 64
        assert cases.SUM_ROWS == 64
        activate(path)
        beyond, last = (cases.contribution(row=6, seq=cases.SUM_BASE + i) for i in (64, 63))
        send(wire, cases.contribution(), beyond, last)
        assert counted(path, 3) == {Verdict.STORED: 2, Verdict.FUTURE_OP: 1}
        assert set(np.flatnonzero(path.store.slots["count"])) == {cases.SEQ & 63, cases.SUM_BASE + 63 & 63}
    whole = XdpDatapath.open("tbx")
    assert whole.store.sum_rows == 256
    assert not whole.store.slots["count"][64:].any()
    whole.close()


def test_rows_and_rings_are_as_large_as_driver_and_ranks_ask_for(
    wire: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways to a program: attached ahead, here for two ranks and used by eight of them; and by the job itself."""
    config = Config(rank=0, ranks=8, ring_mib=1.0)
    monkeypatch.setattr(linear, "linear_bytes", lambda *_, **__: 14 + 20 + 8 + HEADER_BYTES + 512 + 63)
    attach_for_good("tbx", port=cases.PORT, ring_mib=1.0)
    for pinned in (True, False):
        with contextlib.closing(open_datapath("xdp", "tbx", config)) as path:
            assert path.store.width == 512
            assert (path.store.result_rows, path.store.sum_rows) == (2048, 256)
            assert (pin.settings("tbx") is not None) == pinned
        pin.remove("tbx")


def test_leftovers(own_wire: list[str]) -> None:
    """Pins without a program behind them are seen as stale, and go with the next attach or detach."""
    XdpDatapath.pin(Receiver("tbx", cases.PORT, **SIZES))
    folder = next(p for p in (pin.ROOT / "bpf").iterdir() if p.name.startswith("tbx-"))
    (folder / "link").unlink()  # as if somebody had taken the program away
    await_that(lambda: net.xdp_on("tbx") is None, "a worker of the kernel's to take the program away")
    assert not pin.settings("tbx")
    XdpDatapath.pin(Receiver("tbx", cases.PORT, **SIZES))
    assert pin.settings("tbx")
    veths.delete("tbx")
    assert folder.name in pin.sweep()
    assert not folder.exists()


def test_an_interface_that_was_made_again_is_not_the_one_that_was_attached(wire: list[str]) -> None:
    """That of a VLAN leaves the program on the device below it, and takes only the fan-out's along."""
    XdpDatapath.pin(Receiver("tbx", cases.PORT, **SIZES))
    file = pin._settings_file("tbx")
    values = json.loads(file.read_text())
    assert values["index"] == net.index_of("tbx")
    file.write_text(json.dumps(values | {"index": values["index"] + 1}))
    with pytest.raises(AttachError, match=r"removed and made again.*`tailbound attach tbx --replace`"):
        XdpDatapath.open("tbx")
    file.write_text(json.dumps(values))
    assert pin.settings("tbx")


def test_a_device_that_has_another_name_now_keeps_its_program(own_wire: list[str]) -> None:
    """Pins are found by name, and another device may have that by now; a job may run on the first one (kernel-25)."""
    XdpDatapath.pin(Receiver("tbx", cases.PORT, **SIZES))
    with IPRoute() as ip:
        index = net.index_of("tbx")
        ip.link("set", index=index, state="down")
        ip.link("set", index=index, ifname="lan0")
        ip.link("add", ifname="tbx", kind="veth", peer={"ifname": "tby"})
    for replace in (False, True):
        with pytest.raises(AttachError, match="on lan0 now: run `tailbound detach tbx`"):
            XdpDatapath.pin(Receiver("tbx", cases.PORT, **SIZES), replace=replace)
    assert pin.sweep() == []
    assert net.xdp_on("tbx") is None
    assert net.xdp_on("lan0") is not None
    with pytest.raises(AttachError, match=r"lan0 already carries .* or run `tailbound detach tbx`"):
        XdpDatapath.pin(Receiver("lan0", cases.PORT, **SIZES))
    assert pin.remove("tbx")
    assert net.xdp_on("lan0") is None
    XdpDatapath.pin(Receiver("tbx", cases.PORT, **SIZES))
    assert pin.settings("tbx")


@pytest.mark.needs("root")
def test_another_group_does_not_lock_the_first_one_out(wire: list[str]) -> None:
    XdpDatapath.pin(Receiver("tbx", cases.PORT, **SIZES), group=12345)
    veths.go(wire[1])
    XdpDatapath.pin(Receiver("tbx", cases.PORT, **SIZES), group=12346)
    try:
        veths.go(wire[0])
        code = "import sys; sys.path[:0] = sys.argv[1:]\nfrom tailbound.datapath.xdp import XdpDatapath\n"
        command = [sys.executable, "-c", code + "XdpDatapath.open('tbx').close()", *[p for p in sys.path if p]]
        assert stranger(command, 12345).returncode == 0
        assert "for the group" in stranger(command, 12346).stderr.splitlines()[-1]
    finally:
        veths.go(wire[1])
        pin.remove("tbx")
        veths.go(wire[0])


def test_a_sweep_leaves_what_is_just_being_pinned(wire: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half pinned, by a process that goes on: no remainder."""
    sweeps = [threading.Thread(target=pin.sweep)]
    really = syscalls.obj_pin

    def slowly(fd: int, path: str) -> None:
        really(fd, path)
        if sweeps[0].ident is None:
            sweeps[0].start()
            sweeps[0].join(0.3)  # it waits for us: nothing would be gained by more

    monkeypatch.setattr(syscalls, "obj_pin", slowly)
    XdpDatapath.pin(Receiver("tbx", cases.PORT, **SIZES))
    sweeps[0].join()
    assert pin.settings("tbx")
    XdpDatapath.open("tbx").close()


@pytest.mark.parametrize(
    ("interface", "port", "sizes", "error", "says"),
    [
        ("nowhere0", 7000, {}, ConfigError, "nowhere0.*choose one of"),
        ("tbx", 0, {}, ConfigError, "port"),
        ("tbx", 7000, {"width": 100}, ConfigError, "multiple of 64"),
        ("tbx", 7000, {"sum_rows": 100}, ConfigError, "power of two"),
        ("tbx", 7000, {"loader": "gcc"}, ConfigError, "gcc"),
        ("lo", 7000, {}, AttachError, "no native XDP"),
    ],
)
def test_refusals(wire: list[str], interface: str, port: int, sizes: dict, error: type, says: str) -> None:
    loader = sizes.get("loader", "auto")
    asked = Receiver(interface, port, **{name: sizes.get(name, size) for name, size in SIZES.items()})
    with pytest.raises(error, match=says):
        XdpDatapath.attach(asked, loader)
    assert net.xdp_on("tbx") is None

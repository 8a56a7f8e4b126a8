"""Which datapath, why, and what to type: the verdict is a pure function of the facts."""

from __future__ import annotations

import dataclasses
import errno
import json
import struct
from pathlib import Path

import pytest

from tailbound.doctor import facts, interfaces
from tailbound.doctor.verdict import ONE_RANK, choose
from tailbound.errors import ConfigError
from tailbound.kernel import ethtool, net, pin
from tailbound.kernel.net import ELSEWHERE, ELSEWHERE_IPV6
from tailbound.kernel.net import Interface as Way

CAPABLE = dict.fromkeys(facts.CAPABILITY_BITS, True)
MACHINE = facts.Machine(
    kernel="6.1.0-13-amd64", architecture="x86_64", btf=True, bpf_error=None, bcc="/somewhere/bcc",
    headers="/usr/src/linux-headers-6.1.0", clang=None, libbpf=False, effective_uid=0, capabilities=CAPABLE, cpus=8,
)  # fmt: skip
LINK = interfaces.Interface(
    name="eno1", device="eno1", up=True, mtu=1500, device_mtu=1500, driver="mlx5_core", native_xdp=True, rx_queues=8,
    tx_queues=8, tx_most=None, lro=False, vlan_stripping=False, linear=3520, hashes_udp_ports=True, xdp_program=None,
    xdp_name=None,
)  # fmt: skip


def machine(**values: object) -> facts.Machine:
    return dataclasses.replace(MACHINE, **values)


def link(**values: object) -> interfaces.Interface:
    """Its own device unless ``device_mtu`` says that it is a VLAN's."""
    return dataclasses.replace(LINK, **{"device_mtu": values.get("mtu", LINK.mtu)} | values)


NOBODY = {"effective_uid": 1000, "capabilities": dict.fromkeys(CAPABLE, False), "bpf_error": "EPERM: not permitted"}
BARE = {"bcc": None, "headers": None}
CLANG = BARE | {"clang": "/usr/bin/clang", "libbpf": True}
APT = "apt-get install --no-install-recommends "


@pytest.mark.parametrize(
    ("facts_changed", "link_changed", "given", "commands"),
    [
        ({}, {}, {}, None),
        (NOBODY, {}, {"tailbound": "/venv/bin/tailbound", "options": "--group train"},
         ["sudo /venv/bin/tailbound attach eno1 --group train"]),
        (NOBODY, {"xdp_program": 7}, {"attached": True}, None),
        (BARE, {}, {}, [APT + "python3-bpfcc linux-headers-amd64"]),
        ({"bcc": None} | NOBODY | {"bpf_error": None}, {}, {},
         [f"sudo {APT}python3-bpfcc", "sudo tailbound attach eno1"]),
        (CLANG, {}, {}, None),
        (CLANG | {"libbpf": False}, {}, {}, [APT + "libbpf-dev"]),
        (BARE | {"objects": (1344, 1408)}, {}, {}, None),  # an object of this width stands in for compilers
        (BARE | {"objects": (1344, 1408)}, {"mtu": 1450}, {}, None),
        (BARE | {"objects": (1344, 1408)}, {"mtu": 3498}, {}, [APT + "python3-bpfcc linux-headers-amd64"]),
    ],
)  # fmt: skip
def test_xdp_or_the_commands_for_it(
    facts_changed: dict, link_changed: dict, given: dict, commands: list[str] | None
) -> None:
    """None: it is there."""
    verdict = choose(machine(**facts_changed), link(**link_changed), **given)
    assert (verdict.datapath, verdict.interface) == ("xdp" if commands is None else "udp", "eno1")
    assert list(verdict.commands) == (commands or [])
    assert verdict.trainer == "TAILBOUND_INTERFACE=eno1"
    if commands is None:
        assert verdict.notes == (ONE_RANK,)
    elif facts_changed is NOBODY:
        assert "lacks CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN, and nothing is attached yet" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("facts_changed", "link_changed", "words"),
    [
        ({}, {"native_xdp": False, "driver": "r8169"}, "r8169 of eno1 has no native XDP"),
        ({}, {"up": False}, "eno1 is down"),
        ({}, {"linear": 0, "mtu": 9000}, "ip link set dev eno1 mtu 3498"),
        ({}, {"driver": "ena", "mtu": 9000}, "up to MTU 3498, not 9000"),
        ({}, {"driver": "ena", "tx_queues": 8, "tx_most": 8}, "ethtool -L eno1 combined 4"),
        ({"kernel": "6.3.13"}, {"driver": "i40e", "mtu": 9000}, "up to MTU 3050, not 9000"),
        ({}, {"linear": 0, "device_mtu": 9000}, "without a linear part at MTU 9000"),
        ({}, {"driver": "hv_netvsc", "lro": True}, "ethtool -K eno1 lro off"),
        ({}, {"lro": True, "gro_hw": True}, "ethtool -K eno1 lro off rx-gro-hw off"),
        ({}, {"driver": "virtio_net", "gro_hw": True, "gro_hw_fixed": True}, "no CTRL_GUEST_OFFLOADS"),
        ({"btf": False}, {}, "no BTF"),
        ({"kernel": "5.10.0-21-amd64"}, {}, "older than 5.19"),
        ({"bpf_error": "EPERM: not permitted"}, {}, "refuses bpf(2)"),
        # a program that is there is not called nothing, and Tailbound's own is told from somebody else's
        (NOBODY, {"xdp_program": 12, "xdp_name": "tb_worker"}, "Tailbound's own"),
        (NOBODY, {"xdp_program": 12, "xdp_name": "tb_worker", "xdp_owner": "eno1.6"}, "`tailbound detach eno1.6`"),
        (NOBODY, {"xdp_program": 12, "xdp_name": "tb_switch"}, "tailbound switch down"),
        (NOBODY, {"xdp_program": 12, "xdp_name": "xdpfilt"}, "(xdpfilt) is somebody else's"),
    ],
)
def test_what_no_command_of_ours_can_mend(facts_changed: dict, link_changed: dict, words: str) -> None:
    verdict = choose(machine(**facts_changed), link(**link_changed))
    assert verdict.datapath == "udp"
    assert words in " ".join(verdict.reasons)
    assert "nothing is attached" not in " ".join(verdict.reasons)
    assert verdict.commands == ()


def test_no_interface() -> None:
    verdict = choose(MACHINE, None, judged="nothing tells which")
    assert (verdict.datapath, verdict.interface, verdict.reasons) == ("udp", None, ("nothing tells which",))


@pytest.mark.parametrize(
    ("environment", "elsewhere", "judged", "words"),
    [
        ({"TAILBOUND_INTERFACE": "eth2", "MASTER_ADDR": "10.0.0.2"}, "eth0", "eth2", "TAILBOUND_INTERFACE"),
        ({"MASTER_ADDR": "10.0.0.2"}, "eth0", "eth1", "the way to MASTER_ADDR=10.0.0.2"),
        ({"MASTER_ADDR": "127.0.0.1"}, "eth0", "eth0", "the way to other networks (a guess, TAILBOUND_INTERFACE=NAME"),
        ({}, "eth0", "eth0", "the way to other networks (a guess, TAILBOUND_INTERFACE=NAME tells"),
        ({}, None, None, "is not known: TAILBOUND_INTERFACE=NAME tells it, or MASTER_ADDR"),
    ],
)
def test_which_interface_leads_to_the_peers(
    environment: dict[str, str], elsewhere: str | None, judged: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TAILBOUND_INTERFACE", "MASTER_ADDR"):
        monkeypatch.setenv(variable, environment.get(variable, ""))

    def towards(host: str = "") -> Way | None:
        host = host or environment.get("MASTER_ADDR", "")
        if host == ELSEWHERE_IPV6:  # doctor ended with an error about an address that nobody had given
            raise ConfigError("the way leads over a link-local address")
        name = {"10.0.0.2": "eth1", ELSEWHERE: elsewhere}.get(host)
        return Way(name, "10.0.0.1", 1500) if name else None

    monkeypatch.setattr(interfaces, "interface_towards", towards)
    found, why = interfaces.leads_to_peers()
    assert found == judged
    assert words in why
    assert interfaces.leads_to_peers("lo") == ("lo", "it was named")


@pytest.mark.parametrize(
    ("facts_changed", "link_changed", "words"),
    [
        ({}, {"vlan_stripping": True}, "ethtool -K eno1 rxvlan off"),
        ({}, {"driver": "ice", "gro_hw": True}, "ethtool -K eno1 rx-gro-hw off"),
        ({}, {"driver": "bnxt_en", "gro_hw": True, "mtu": 9000, "linear": 9100}, "ethtool -K eno1 rx-gro-hw off"),
        ({}, {"driver": "bnxt_en", "gro_hw": True, "device_mtu": 9000}, "ethtool -K eno1 rx-gro-hw off"),
        ({}, {"rx_queues": 1, "rx_most": 16}, "ethtool -L eno1 combined 8 (or rx 8)"),
        ({}, {"driver": "ice", "mtu": 9000, "linear": 3072}, "ice hands over 3072 bytes of a frame in one piece"),
        ({}, {"hashes_udp_ports": False}, "ethtool -N eno1 rx-flow-hash udp4 sdfn"),
        ({}, {"hashes_udp_ports": False, "ipv6": True}, "ethtool -N eno1 rx-flow-hash udp6 sdfn"),
        ({}, {"native_xdp": None}, "attaching will tell"),
        # what is there, or cannot be, is none
        ({}, {"driver": "virtio_net", "gro_hw": True}, None),
        ({}, {"driver": "bnxt_en", "gro_hw": True, "lro": True}, None),
        ({"cpus": 1}, {"rx_queues": 1, "rx_most": 16}, None),
        ({}, {"driver": "ena", "tx_queues": 4, "rx_queues": 4, "tx_most": 8}, None),
        ({"kernel": "6.4.0-rc1"}, {"driver": "i40e", "mtu": 9000, "linear": 9014}, None),
        ({"kernel": "7.0"}, {"driver": "i40e", "mtu": 9000, "linear": 9014}, None),
    ],
)
def test_what_is_no_obstacle_is_a_note(facts_changed: dict, link_changed: dict, words: str | None) -> None:
    verdict = choose(machine(**{"kernel": "6.4.0-1-amd64"} | facts_changed), link(**link_changed))
    *notes, last = verdict.notes
    assert (verdict.datapath, len(notes), last) == ("xdp", int(words is not None), ONE_RANK)
    assert words is None or words in notes[0]


class Nic:
    """A driver's answers to ethtool's ioctls, laid out as in ``linux/ethtool.h``; what is not asked for it refuses."""

    def __init__(self, *queues: int) -> None:
        self.queues = queues

    def ask(self, interface: str, request: bytes) -> bytes:
        (command,) = struct.unpack_from("=I", request)
        if command == 0x3C:  # ETHTOOL_GCHANNELS
            return struct.pack("=9I", command, *self.queues)
        if command == 0x29:  # ETHTOOL_GRXFH, of UDP over IPv4: addresses alone; over IPv6: ports, too
            (flow,) = struct.unpack_from("=I", request, 4)
            return request[:8] + struct.pack("=Q", {2: 3 << 4, 6: 15 << 4}[flow]) + request[16:]
        raise OSError(errno.EOPNOTSUPP, "not supported")


def test_what_a_driver_says_of_queues_and_of_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ethtool, "_ask", Nic(0, 0, 0, 16, 0, 0, 0, 4).ask)
    on = {"rx-lro": True, "rx-gro-hw": True, "rx-vlan-hw-parse": False}
    monkeypatch.setattr(ethtool, "features", lambda _, **__: on)
    found = interfaces.interface("lo")
    assert (found.rx_queues, found.rx_most, found.tx_queues, found.tx_most) == (4, 16, 4, 16)
    assert (found.lro, found.gro_hw, found.vlan_stripping, found.hashes_udp_ports) == (True, True, False, False)
    assert found.gro_hw_fixed
    monkeypatch.setattr(net, "families_of", lambda _: {True})
    assert interfaces.interface("lo").hashes_udp_ports is True
    monkeypatch.setattr(ethtool, "_ask", Nic(4, 4, 0, 0, 2, 1, 0, 0).ask)
    found = interfaces.interface("lo")
    assert (found.rx_queues, found.rx_most, found.tx_queues) == (2, 4, 1)


def test_interfaces_of_this_machine() -> None:
    loopback = interfaces.interface("lo")
    assert (loopback.driver, loopback.mtu, loopback.device_mtu) == ("loopback", 65536, 65536)
    assert (loopback.rx_most, loopback.tx_most, loopback.hashes_udp_ports) == (None,) * 3  # it does not say
    with pytest.raises(ConfigError, match=r"no interface 'nowhere0'.* lo"):
        interfaces.interface("nowhere0")


def test_a_program_is_named_by_the_interface_that_it_was_attached_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of VLAN 5 shares its device with that of VLAN 6: a colleague's job there was called somebody else's."""
    monkeypatch.setattr(pin, "ROOT", tmp_path)
    names = ["eth0", "eth0.5", "eth0.6", "eth0_6", "eth1"]
    monkeypatch.setattr(pin.socket, "if_nameindex", lambda: list(enumerate(names, 1)))
    assert pin._pins("eth0.6") != pin._pins("eth0_6")
    assert pin.owner("eth0.5", 12) is None
    for name, number in (("eth0.6", 12), ("eth0", 11), ("eth1", 10)):
        pin._settings_file(name).write_text(json.dumps({"prog_id": number, "interface": name}))
    assert (pin.owner("eth0.5", 12), pin.owner("eth0.5", 11)) == ("eth0.6", "eth0")
    assert pin.owner("eth0.5", 13) is None
    pin._settings_file("old0").write_text(json.dumps({"prog_id": 13, "interface": "old0"}))
    assert pin.owner("eth0.5", 13) == "old0"  # as the device was called then

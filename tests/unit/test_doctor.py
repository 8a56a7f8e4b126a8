"""Which datapath, why, and what to type: the verdict is a pure function of the facts."""

from __future__ import annotations

import dataclasses
import json
import os
import platform

import pytest

from tailbound.doctor import examine, facts, interfaces
from tailbound.doctor.verdict import choose
from tailbound.errors import ConfigError

CAPABLE = dict.fromkeys(facts.CAPABILITY_BITS, True)
MACHINE = facts.Machine(
    kernel="6.1.0-13-amd64",
    architecture="x86_64",
    btf=True,
    jit=True,
    bpf_error=None,
    bcc="/somewhere/bcc",
    bcc_version="0.26.0",
    headers="/usr/src/linux-headers-6.1.0",
    clang=None,
    libbpf=False,
    effective_uid=0,
    capabilities=CAPABLE,
    bpffs="/sys/fs/bpf",
    cpus=8,
)
LINK = interfaces.Interface(
    name="eno1",
    up=True,
    mtu=1500,
    driver="mlx5_core",
    native_xdp=True,
    rx_queues=8,
    tx_queues=8,
    lro=False,
    hashes_udp_ports=True,
    xdp_program=None,
)


def machine(**values: object) -> facts.Machine:
    return dataclasses.replace(MACHINE, **values)


def link(**values: object) -> interfaces.Interface:
    return dataclasses.replace(LINK, **values)


def test_all_there_gives_xdp() -> None:
    verdict = choose(MACHINE, LINK)
    assert (verdict.datapath, verdict.interface, verdict.commands, verdict.notes) == ("xdp", "eno1", (), ())


def test_no_privileges_gives_udp_and_the_one_command() -> None:
    user = machine(effective_uid=1000, capabilities=dict.fromkeys(CAPABLE, False), bpf_error="EPERM: not permitted")
    verdict = choose(user, LINK, tailbound="/venv/bin/tailbound")
    assert verdict.datapath == "udp"
    assert verdict.commands == ("sudo /venv/bin/tailbound attach eno1",)
    assert "lacks CAP_BPF and CAP_NET_ADMIN" in verdict.reasons[0]


def test_attached_gives_xdp_without_privileges() -> None:
    user = machine(effective_uid=1000, capabilities=dict.fromkeys(CAPABLE, False), bpf_error="EPERM: not permitted")
    assert choose(user, link(xdp_program=7), attached=True).datapath == "xdp"


def test_missing_packages_are_named_for_apt() -> None:
    verdict = choose(machine(bcc=None, headers=None), LINK)
    assert verdict.datapath == "udp"
    assert verdict.commands == ("apt-get install --no-install-recommends python3-bpfcc linux-headers-amd64",)
    user = machine(bcc=None, effective_uid=1000, capabilities=dict.fromkeys(CAPABLE, False))
    assert choose(user, LINK).commands == (
        "sudo apt-get install --no-install-recommends python3-bpfcc",
        "sudo tailbound attach eno1",
    )


def test_clang_can_stand_in_for_bcc() -> None:
    without = machine(bcc=None, headers=None, clang="/usr/bin/clang", libbpf=True)
    assert choose(without, LINK).datapath == "xdp"
    verdict = choose(dataclasses.replace(without, libbpf=False), LINK)
    assert verdict.commands == ("apt-get install --no-install-recommends libbpf-dev",)


@pytest.mark.parametrize(
    ("facts_changed", "link_changed", "words"),
    [
        ({}, {"native_xdp": False, "driver": "r8169"}, "r8169 of eno1 has no native XDP"),
        ({}, {"up": False}, "eno1 is down"),
        ({}, {"xdp_program": 12}, "XDP program 12 is on eno1 already"),
        ({"btf": False}, {}, "no BTF"),
        ({"kernel": "5.10.0-21-amd64"}, {}, "older than 5.19"),
        ({"kernel": "4.19.0"}, {}, "older than 5.19"),
    ],
)
def test_what_no_command_of_ours_can_mend(facts_changed: dict, link_changed: dict, words: str) -> None:
    verdict = choose(machine(**facts_changed), link(**link_changed))
    assert verdict.datapath == "udp"
    assert words in " ".join(verdict.reasons)
    assert verdict.commands == ()


def test_a_kernel_that_refuses_bpf_to_root() -> None:
    verdict = choose(machine(bpf_error="EPERM: not permitted"), LINK)
    assert verdict.datapath == "udp"
    assert "refuses bpf(2)" in verdict.reasons[0]


def test_no_interface() -> None:
    verdict = choose(MACHINE, None)
    assert (verdict.datapath, verdict.interface) == ("udp", None)
    assert "no network interface" in verdict.reasons[0]


def test_notes_are_commands_to_type() -> None:
    notes = choose(MACHINE, link(lro=True, hashes_udp_ports=False, native_xdp=None)).notes
    assert [n.rpartition(": ")[2] for n in notes[:2]] == [
        "ethtool -K eno1 lro off",
        "ethtool -N eno1 rx-flow-hash udp4 sdfn",
    ]
    assert "attaching will tell" in notes[2]


def test_facts_of_this_machine() -> None:
    here = facts.machine()
    assert here.kernel == platform.release()
    assert here.effective_uid == os.geteuid()
    assert here.cpus >= (os.cpu_count() or 1)
    assert set(here.capabilities) == set(facts.CAPABILITY_BITS)


def test_interfaces_of_this_machine() -> None:
    loopback = interfaces.interface("lo")
    assert (loopback.driver, loopback.mtu) == ("loopback", 65536)
    assert all(i.name != "lo" for i in interfaces.interfaces())
    with pytest.raises(ConfigError, match=r"no interface 'nowhere0'.* lo"):
        interfaces.interface("nowhere0")


def test_report_as_json_has_every_part() -> None:
    report = json.loads(examine("lo", ring_mib=8, workers=4).to_json())
    assert set(report) == {"version", "machine", "interfaces", "verdict", "memory"}
    assert report["verdict"]["interface"] == "lo"
    assert report["memory"]["total_bytes"] == sum(report["memory"]["bytes_by_map"].values())
    assert report["memory"]["total_bytes"] > 8 * 2**20 / 2

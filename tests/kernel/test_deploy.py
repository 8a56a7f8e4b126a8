"""What operators do: the least capabilities, another version in place of the old one, cards by their PCI device."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailbound.cli import cli
from tailbound.datapath.xdp import XdpDatapath, detach
from tailbound.datapath.xdp import attach as attach_for_good
from tailbound.errors import AttachError, CapabilityError, ConfigError
from tailbound.kernel import attach, net, pin, syscalls
from tailbound.kernel import compile as compile_

#: In the unit, in the DaemonSet and in docs/deploy.md.
LEAST = ("BPF", "CHOWN", "NET_ADMIN", "PERFMON")
SMALL: dict[str, Any] = {"ring_mib": 1, "mtu": 400}
COMMAND = [sys.executable, "-m", "tailbound", "attach", "tbx", "--ring", "1", "--mtu", "400", "--group", "12345"]
COMMAND += ["--loader", "clang"]

needs_wire = pytest.mark.needs("netns", "bpf", "clang", "libbpf")


def attach_with(*capabilities: str) -> subprocess.CompletedProcess[str]:
    """By a root that has these capabilities and no others."""
    bounds = ",".join(["-all", *(f"+{name.lower()}" for name in capabilities)])
    command = ["setpriv", "--bounding-set", bounds, "--inh-caps", "-all", *COMMAND]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@needs_wire
def test_the_least_capabilities_are_enough(wire: list[str]) -> None:
    pin.mount()  # as the unit does
    done = attach_with(*LEAST)
    assert done.returncode == 0, done.stderr
    found = pin.settings("tbx")
    assert found is not None
    assert os.stat(pin._pins("tbx") / "control").st_gid == 12345


@needs_wire
@pytest.mark.parametrize("missing", ["PERFMON", "NET_ADMIN", "BPF"])
def test_one_less_is_refused_by_name(wire: list[str], missing: str) -> None:
    pin.mount()
    done = attach_with(*(name for name in LEAST if name != missing))
    assert done.returncode == 1
    assert f"CAP_{missing}" in done.stderr
    assert "Traceback" not in done.stderr
    assert pin.settings("tbx") is None


def parsed(verb: str, *words: str) -> None:
    """There is such a command, and it has these options."""
    command = cli.get_command(None, verb)  # type: ignore[arg-type]
    assert command is not None
    command.make_parser(command.make_context(verb, list(words), resilient_parsing=True)).parse_args(list(words))


@pytest.mark.parametrize("name", ["tailbound@.service", "tailbound-metrics.service"])
def test_units_call_commands_and_options_that_there_are(repository: Path, name: str) -> None:
    unit = (repository / "deploy" / name).read_text()
    called = re.findall(r"^Exec\w+=/usr/local/bin/tailbound (.*)$", unit, re.MULTILINE)
    assert called
    for line in called:
        parsed(*line.replace("%i", "eth0").replace("${GROUP}", "training").replace("$OPTIONS", "").split())


def test_unit_and_daemonset_ask_for_the_least(repository: Path) -> None:
    """And what can be checked of the DaemonSet without a cluster and would harm jobs or be refused there."""
    unit = (repository / "deploy/tailbound@.service").read_text()
    bounds = re.search(r"^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)[1].split()  # type: ignore[index]
    assert sorted(bounds) == [f"CAP_{name}" for name in LEAST]
    assert f"Where={pin.bpffs()}\n" in (repository / "deploy/run-tailbound-bpf.mount").read_text()
    spec = yaml.safe_load((repository / "deploy/daemonset.yaml").read_text())["spec"]
    assert spec["updateStrategy"] == {"type": "OnDelete"}, "an update would end jobs"
    template = spec["template"]
    assert spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    pod = template["spec"]
    (attach,), (metrics,) = pod["initContainers"], pod["containers"]
    assert {m["name"] for each in (attach, metrics) for m in each["volumeMounts"]} == {
        v["name"] for v in pod["volumes"]
    }
    for container, added in ((attach, list(LEAST)), (metrics, [])):
        assert container["image"] == "REGISTRY/tailbound:VERSION", "without a tag nodes would keep an older image"
        capabilities = container["securityContext"]["capabilities"]
        assert (capabilities["drop"], sorted(capabilities.get("add", []))) == (["ALL"], added)
        parsed(*container["args"])
    (port,) = metrics["ports"]
    assert metrics["readinessProbe"]["httpGet"]["port"] == port["name"]
    assert int(template["metadata"]["annotations"]["prometheus.io/port"]) == port["containerPort"]


@needs_wire
def test_another_version_gives_way_and_a_stranger_does_not(wire: list[str]) -> None:
    """Rule: kernel-25."""
    attach_for_good("tbx", **SMALL)
    old = net.xdp_on("tbx")
    with pytest.raises(AttachError, match="already carries Tailbound's tb_worker"):
        attach_for_good("tbx", **SMALL)
    file = pin._settings_file("tbx")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"abi": 6}))
    with pytest.raises(AttachError, match="another version"):
        pin.settings("tbx")
    attach_for_good("tbx", **SMALL, replace=True)
    new = net.xdp_on("tbx")
    assert old is not None
    assert new is not None
    assert new.prog_id != old.prog_id
    assert pin.settings("tbx")
    job = XdpDatapath.open("tbx")
    assert "nothing was done" in attach_for_good("tbx", **SMALL, replace=True)
    assert net.xdp_on("tbx") == new, "a pod that is made again takes the program off under a job"
    assert not job.withdrawn
    attach_for_good("tbx", **SMALL | {"ring_mib": 2}, replace=True)
    assert net.xdp_on("tbx") != new
    assert job.withdrawn, "a job that runs there is told"
    job.close()
    job = XdpDatapath.open("tbx")
    assert not job.withdrawn
    pin.remove("tbx")
    assert job.withdrawn
    job.close()
    link = syscalls.link_create(
        syscalls.prog_load(bytes.fromhex("b700000002000000 9500000000000000"), name="another"),
        net.index_of("tbx"),
        syscalls.XDP_FLAGS_DRV_MODE,
    )
    try:
        for replace in (False, True):
            with pytest.raises(AttachError, match=r"another.* which Tailbound never replaces"):
                attach_for_good("tbx", **SMALL, replace=replace)
        assert attach.program_name(net.xdp_on("tbx").prog_id) == "another"
    finally:
        os.close(link)


@needs_wire
def test_what_would_end_with_the_command_is_refused(wire: list[str]) -> None:
    """No file system of pins on the host, and a mount namespace that is made for the command (`ip netns exec`)."""
    pin.mount()
    hidden = f"mount -t tmpfs none {pin.ROOT} && {' '.join(COMMAND)}; code=$?; ls {pin.ROOT}; exit $code"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", hidden]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "run-tailbound-bpf.mount" in done.stderr
    assert ".json" not in done.stdout
    assert net.xdp_on("tbx") is None


@needs_wire
def test_a_second_attach_says_for_whom_it_is_attached(wire: list[str]) -> None:
    attach_for_good("tbx", **SMALL, group="12345")
    with pytest.raises(AttachError, match="it is attached already, for group 12345"):
        attach_for_good("tbx", **SMALL, group="12345")


@needs_wire
def test_a_program_is_not_taken_from_under_a_job(wire: list[str]) -> None:
    attach_for_good("tbx", **SMALL)
    job = XdpDatapath.open("tbx")
    assert detach("tbx")  # none has begun
    attach_for_good("tbx", **SMALL)
    job.close()
    job = XdpDatapath.open("tbx")
    job.store.control["active"] = job.active
    with pytest.raises(AttachError, match=r"a job receives at 198\.18\.0\.1:5515.*--force"):
        detach("tbx")
    assert pin.settings("tbx")
    assert detach("tbx", force=True)
    job.close()
    attach_for_good("tbx", **SMALL)
    job = XdpDatapath.open("tbx")
    job.store.control["active"] = job.active
    job.socket.close()  # as if it had been killed
    assert detach("tbx")
    job.close()
    assert not detach("tbx")
    with pytest.raises(ConfigError, match="no interface 'tby'"):
        detach("tby")


@needs_wire
def test_a_program_of_other_sources_is_refused(wire: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may know a packet's form by another rule, and add what it does not know."""
    attach_for_good("tbx", **SMALL)
    monkeypatch.setattr(compile_, "signature", lambda: "of today")
    with pytest.raises(AttachError, match="may not know this one's packets"):
        XdpDatapath.open("tbx")


@needs_wire
def test_a_program_that_does_not_load_leaves_the_old_one(wire: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    attach_for_good("tbx", **SMALL)
    old = net.xdp_on("tbx")

    def refused(*_: Any, **__: Any) -> int:
        raise CapabilityError("the kernel refused it")

    monkeypatch.setattr("tailbound.kernel.load.load_worker", refused)
    with pytest.raises(CapabilityError, match="refused it"):
        attach_for_good("tbx", **SMALL | {"ring_mib": 2}, replace=True)
    assert net.xdp_on("tbx") == old
    assert pin.settings("tbx")

"""The strings of ``tailbound lab run``, and the pure shape of a lab."""

from __future__ import annotations

import ipaddress

import pytest
from click.testing import CliRunner

from tailbound.errors import ConfigError
from tailbound_lab.lab.cli import lab
from tailbound_lab.lab.spec import (
    Burst,
    LabSpec,
    Straggler,
    parse_burst,
    parse_probability,
    parse_rate,
    parse_straggler,
)
from tailbound_lab.lab.topology import Link, describe


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1gbit", 10**9), ("2.5Gbit", 2_500_000_000), ("500 mbit", 5 * 10**8), ("800kbit/s", 800_000), ("9000bit", 9000)],
)
def test_rates(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "1", "1gbps", "1GB", "-1gbit", "7kbit", "1tbit", "1e9bit", "nanbit"])
def test_bad_rates(text: str) -> None:
    with pytest.raises(ConfigError, match="rate"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0.0), ("0.01", 0.01), ("1%", 0.01), (" 12.5% ", 0.125), ("1e-3", 0.001)]
)
def test_probabilities(text: str, value: float) -> None:
    assert parse_probability(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "one", "1", "100%", "-0.1", "nan", "inf", "0.1x"])
def test_bad_probabilities_name_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="corruption"):
        parse_probability(text, "corruption")


def test_bursts() -> None:
    assert parse_burst("0.01") == Burst(0.01, 5.0)
    assert parse_burst("2%:8") == Burst(0.02, 8.0)


@pytest.mark.parametrize(
    "text", ["0.01:", "0.01:0", "0.01:x", "0.01:0.5", "2:4", ":4", "0.01:4:4", "0.01:nan", "0.01:inf"]
)
def test_bad_bursts(text: str) -> None:
    with pytest.raises(ConfigError, match="burst"):
        parse_burst(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3:40", Straggler(3, 40.0, 160.0)),
        ("0:2.5:100", Straggler(0, 2.5, 100.0)),
        ("1:40:step", Straggler(1, 40.0, None)),
    ],
)
def test_stragglers_read_as_they_are_written(text: str, expected: Straggler) -> None:
    assert parse_straggler(text) == expected
    assert parse_straggler(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", "3", "3:", "x:40", "-1:40", "3:0", "3:-4", "3:40:40", "3:40:20", "3:40:often", "1:2:3:4", "1:nan"]
)
def test_bad_stragglers(text: str) -> None:
    with pytest.raises(ConfigError, match="straggler"):
        parse_straggler(text)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"workers": 0}, "workers"),
        ({"workers": 257}, "workers"),
        ({"loss": 1.0}, "loss"),
        ({"duplicate": -0.1}, "duplicate"),
        ({"corrupt": float("nan")}, "corrupt"),
        ({"burst": Burst(1.5)}, "burst"),
        ({"burst": Burst(0.1, 0.5)}, "burst"),
        ({"rate": 1}, "rate"),
        ({"mtu": 100}, "MTU"),
        ({"mtu": 65536}, "MTU"),
        ({"port": 0}, "port"),
        ({"port": 65536}, "port"),
        ({"straggler": Straggler(4, 1.0, None)}, "straggler rank 4"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LabSpec(**{"workers": 4, **settings})  # type: ignore[arg-type]


def test_every_address_is_its_own_and_in_the_benchmark_range() -> None:
    topology = describe("tb-1-2-3", 256, cables=True)
    addresses = [w.address_on(link) for w in topology.workers for link in Link]
    assert len(set(addresses)) == 512
    assert all(ipaddress.ip_address(a) in ipaddress.ip_network("198.18.0.0/15") for a in addresses)
    for link in Link:
        hosts = [ipaddress.ip_address(link.address(rank)) for rank in range(256)]
        assert all(h in link.network and h not in (link.network[0], link.network[-1]) for h in hosts)
    macs = [mac for w in topology.workers for mac in (w.mac, Link.PLAIN.mac(w.rank))]
    assert len(set(macs)) == 512
    assert all(int(mac[:2], 16) & 3 == 2 for mac in macs), "locally administered, unicast"
    assert len(set(topology.namespaces)) == 1 + 256 + 256


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--rate", "fast"], "--rate"),
        (["--loss", "2"], "--loss"),
        (["--burst-loss", "0.1:x"], "--burst-loss"),
        (["--straggler", "0"], "--straggler"),
        (["--workers", "2", "--straggler", "5:10"], "straggler rank 5"),
        (["--workers", "0"], "workers"),
        (["--mtu", "9"], "MTU"),
        ([], "Missing argument"),
    ],
)
def test_bad_options_are_usage_errors(options: list[str], named: str) -> None:
    command = ["--", "true"] if options else []
    result = CliRunner().invoke(lab, ["run", *options, *command])
    assert result.exit_code == 2
    assert named in result.output

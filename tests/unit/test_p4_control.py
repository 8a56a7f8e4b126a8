"""The P4 switch's control plane without a switch: sizes, entries, commands, and what is said where tools lack."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tailbound.errors import AttachError, ConfigError
from tailbound.kernel import cache
from tailbound.kernel.cache import assets
from tailbound.kernel.switch import Entry, Member
from tailbound.switch.p4 import commands, runtime
from tailbound.switch.p4.compile import Sizes, compile_switch
from tailbound.wire.schema import SWITCH_JOBS, VERDICTS

SIZES = Sizes(slots=64, jobs=2, ranks=4, ports=8)
MAC = bytes.fromhex("027b00020000")
ENTRY = Entry(
    cookie=7,
    address="198.18.252.1",
    mac=MAC,
    port=45900,
    base=16,
    rows=16,
    headroom=2,
    members=(Member("198.18.0.1", b"\x02" * 6, 3), None),
)


def test_defaults_are_those_of_the_program() -> None:
    text = (assets("p4") / "sizes.p4").read_text()
    found = {name.lower(): int(value) for name, value in re.findall(r"^#define TB_(\w+) (\d+)$", text, re.MULTILINE)}
    assert found == vars(Sizes())
    assert found["jobs"] == SWITCH_JOBS
    assert f"TB_VERDICTS = {VERDICTS};" in text


@pytest.mark.parametrize(
    "size", [{"jobs": SWITCH_JOBS + 1}, {"ranks": 256}, {"slots": 0}, {"ports": 512}, {"codes": 704}], ids=str
)
def test_sizes_that_cannot_be(size: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="in a P4 switch"):
        Sizes(**size)


@pytest.mark.parametrize(
    ("members", "message"),
    [((None,) * 5, r"give 1\.\.4"), ((Member("198.18.0.1", MAC, 8),), r"0\.\.7")],
    ids=["ranks", "port"],
)
def test_entries_without_room(members: tuple[Member | None, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        commands.check(replace(ENTRY, members=members), SIZES)


def test_a_job_as_commands() -> None:
    commands.check(ENTRY, SIZES)
    service, neighbour = commands.shared(ENTRY, 1)
    assert service == "table_add TailboundIngress.admit.services TailboundIngress.admit.serve 198.18.252.1 45900 => 1"
    assert neighbour.endswith("TailboundIngress.forward.answer 198.18.252.1 => 02:7b:00:02:00:00")
    *ranks, last = commands.job(ENTRY, 1)
    assert ranks == [
        "table_add TailboundEgress.receivers TailboundEgress.send_to 1 0 => 02:02:02:02:02:02 198.18.0.1",
        "table_add TailboundIngress.admit.senders TailboundIngress.admit.know 1 0 => 198.18.0.1 3",
    ]
    assert last == (
        "table_add TailboundIngress.admit.jobs TailboundIngress.admit.join 198.18.252.1 45900 7"
        " => 1 2 16 15 2 17 02:7b:00:02:00:00"
    )


def script(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder whose scripts are found before all other tools."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)  # one process looks for the user's only once
    return tmp_path


def test_a_program_is_compiled_once(fake: Path) -> None:
    compiler = f"""
        [ "$1" = --version ] && exit
        echo "$@" >> {fake}/calls
        while [ "$1" != -o ]; do shift; done
        echo '{{}}' > "$2"
    """
    script(fake, "p4c-bm2-ss", compiler)
    assert compile_switch(SIZES) == compile_switch(SIZES) == b"{}\n"
    (call,) = (fake / "calls").read_text().splitlines()
    assert "-DTB_SLOTS=64 -DTB_JOBS=2 -DTB_RANKS=4 -DTB_PORTS=8 -DTB_CODES=512" in call
    compile_switch(replace(SIZES, slots=128))
    assert len((fake / "calls").read_text().splitlines()) == 2


#: The conversation that ``simple_switch_CLI`` has with its user.
_TALK = """
while read -r line; do
  case "$line" in
    tailbound_*) echo "*** Unknown syntax: $line" ;;
    table_add*) echo "Entry has been added with handle 5" ;;
    bad*) echo "Invalid table operation (DUPLICATE_ENTRY)" ;;
    gone*) exit ;;
    *) echo "answer to $line" ;;
  esac
  printf 'RuntimeCmd: '
done
"""


def test_a_conversation(fake: Path) -> None:
    script(fake, "simple_switch_CLI", _TALK)
    session = runtime.Runtime(9090)
    try:
        assert session.run_all(["one", "table_add x"]) == ["answer to one\n", "Entry has been added with handle 5\n"]
        with pytest.raises(AttachError, match=r"refuses 'bad thing': Invalid table operation \(DUPLICATE_ENTRY\)"):
            session.run("bad thing")
        assert session.run("two") == "answer to two\n"
        with pytest.raises(AttachError, match="no answer from a switch at thrift port 9090"):
            session.run("gone")
    finally:
        session.close()

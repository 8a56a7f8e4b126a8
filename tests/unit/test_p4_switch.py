"""The P4 switch without a switch: sizes, entries, commands, and ``tailbound switch p4`` with scripts as its tools."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tailbound import cli
from tailbound.errors import AttachError, ConfigError
from tailbound.kernel import cache, ethtool, net
from tailbound.kernel.cache import assets
from tailbound.kernel.switch import Entry, Member
from tailbound.switch.p4 import commands, runtime
from tailbound.switch.p4.compile import Sizes, compile_switch
from tailbound.switch.p4.process import Process
from tailbound.wire.schema import SWITCH_JOBS, VERDICTS, Verdict

SIZES = Sizes(slots=64, jobs=2, ranks=4, ports=8)
MAC = bytes.fromhex("027b00020000")


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


def test_entries_without_room() -> None:
    for members, message in (((None,) * 5, r"give 1\.\.4"), ((Member("198.18.0.1", MAC, 8),), r"0\.\.7")):
        entry = Entry(7, "198.18.252.1", MAC, 45900, base=16, rows=16, headroom=2, members=members)
        with pytest.raises(ConfigError, match=message):
            commands.check(entry, SIZES)


# -- with scripts in the place of p4c and bmv2 ------------------------------------------------------------------------

#: By its name what each tool does: the compiler writes down how it was called, the switch listens at its thrift port
#: until it is ended, and its command line writes down what it is told.
SCRIPTS = {
    "p4c-bm2-ss": """#!/bin/sh
[ "$1" = --version ] && exit
echo "$@" >> "$CALLS"
while [ "$1" != -o ]; do shift; done
echo '{}' > "$2"
""",
    "simple_switch": """#!/usr/bin/python3
import socket, sys
sock = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--thrift-port") + 1])))
while True:
    sock.accept()[0].close()
""",
    "simple_switch_CLI": """#!/bin/sh
[ "$1" = --help ] && exit
while read -r line; do
  case "$line" in
    tailbound_*) echo "*** Unknown syntax: $line" ;;
    table_add*|mc_node_create*) echo "$line" >> "$TOLD"; echo "Entry has been added with handle 5" ;;
    counter_read*) echo "x= 3 packets, 180 bytes" ;;
    register_read*verdicts) echo "x= $VERDICTS" | sed "s/x=/${line#register_read }=/" ;;
    register_read*drops*) echo "${line#register_read }= 0" ;;
    register_read*) echo "${line#register_read }= $CELLS" ;;
    bad*) echo "Invalid table operation (DUPLICATE_ENTRY)" ;;
    gone*) exit ;;
    *) echo "$line" >> "$TOLD"; echo "answer to $line" ;;
  esac
  printf 'RuntimeCmd: '
done
""",
}


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder whose scripts are found before all other tools; what they write down is beside it."""
    sizes, folder = Sizes(slots=64), tmp_path / "tools"
    row = ["1" if verdict == Verdict.ABANDONED else "0" for verdict in range(VERDICTS)]
    for name, value in {
        "PATH": f"{folder}:/usr/bin:/bin", "TOLD": tmp_path / "told", "CALLS": tmp_path / "calls",
        "VERDICTS": ",".join(row * (sizes.jobs * (sizes.ranks + 1))), "CELLS": ", ".join(["7"] * sizes.slots),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)  # one process looks for the user's only once
    monkeypatch.setattr(ethtool, "whole_frames", lambda name: None)
    monkeypatch.setattr(net, "mac_of", lambda name: bytes.fromhex("020000000009"))
    folder.mkdir()
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def test_a_program_is_compiled_once(tools: Path, tmp_path: Path) -> None:
    assert compile_switch(SIZES) == compile_switch(SIZES) == b"{}\n"
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "-DTB_SLOTS=64 -DTB_JOBS=2 -DTB_RANKS=4 -DTB_PORTS=8 -DTB_CODES=512" in call
    compile_switch(replace(SIZES, slots=128))
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


@pytest.mark.usefixtures("tools")
def test_a_conversation() -> None:
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


P4 = (
    "switch", "p4", "lo", "--address", "198.18.252.1", "--slots", "64", "--thrift-port", "9123",
    "--rank", "198.18.0.1,02:02:02:02:02:02,lo", "--cookie", "7", "--station", "02:02:02:02:02:02,lo",
)  # fmt: skip


@pytest.mark.usefixtures("tools")
def test_a_switch_takes_a_job_and_ends_with_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Process] = []

    def interrupted(process: Process) -> int:
        assert process.alive()
        ran.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(Process, "wait", interrupted)
    status = cli.main(P4)
    out, error = capsys.readouterr()
    assert status == 0, error
    said = out.split()
    assert "TAILBOUND_SWITCH=198.18.252.1,rows=64,form=sums,codes=512,cookie=7" in said
    told = (tmp_path / "told").read_text()
    assert "forward.macs TailboundIngress.forward.send 02:02:02:02:02:02 => 0" in told
    assert "admit.join 198.18.252.1 5515 7 => 0 1 0 63" in told
    assert "admit.know 0 0 => 198.18.0.1 0" in told
    assert "TailboundEgress.send_to 0 0 => 02:02:02:02:02:02 198.18.0.1" in told
    assert "switch 198.18.252.1 runs on lo: rows of 512 codes" in error
    assert "0 final, 64 open, 65 rows abandoned" in error
    (process,) = ran
    assert not process.alive()


@pytest.mark.usefixtures("tools")
def test_a_switch_that_ends_by_itself_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Process, "wait", lambda _: 3)
    assert cli.main(P4) == 1
    assert "has ended with status 3" in capsys.readouterr().err


@pytest.mark.parametrize("lacking", ["p4c-bm2-ss", "simple_switch", "simple_switch_CLI"])
def test_a_tool_that_is_missing_is_named_before_anything_is_changed(
    tools: Path, lacking: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tools / lacking).unlink()
    touched: list[str] = []
    monkeypatch.setattr(ethtool, "whole_frames", touched.append)
    monkeypatch.setenv("PATH", str(tools))
    assert cli.main(P4) == 1
    assert f"{lacking} is not on PATH" in capsys.readouterr().err
    assert touched == []

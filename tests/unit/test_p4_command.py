"""``tailbound switch p4``, with scripts in the place of p4c and bmv2, and without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tailbound import cli
from tailbound.kernel import cache, ethtool, net
from tailbound.switch.p4.process import Process


class Said(NamedTuple):
    """What a command came to."""

    status: int
    out: str
    error: str


Run = Callable[..., Said]

#: Listens at its thrift port until it is ended, and writes down how it was started.
_SWITCH = """#!/usr/bin/python3
import socket, sys, time
port = int(sys.argv[sys.argv.index("--thrift-port") + 1])
open("arguments", "w").write(" ".join(sys.argv[1:]))
sock = socket.create_server(("127.0.0.1", port))
while True:
    sock.accept()[0].close()
"""

#: The conversation that ``simple_switch_CLI`` has with its user; it writes down what it was told.
_CLI = """#!/bin/sh
[ "$1" = --help ] && exit
while read -r line; do
  case "$line" in
    tailbound_*) echo "*** Unknown syntax: $line" ;;
    table_add*|mc_node_create*) echo "$line" >> "$TOLD"; echo "Entry has been added with handle 5" ;;
    counter_read*) echo "x= 3 packets, 180 bytes" ;;
    register_read*verdicts) echo "x= $VERDICTS" | sed "s/x=/${line#register_read }=/" ;;
    register_read*drops*) echo "${line#register_read }= 0" ;;
    register_read*) echo "${line#register_read }= $CELLS" ;;
    *) echo "$line" >> "$TOLD" ;;
  esac
  printf 'RuntimeCmd: '
done
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """``tailbound switch ...``, with its files below a folder of the test and nothing on PATH but the tests' own."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    monkeypatch.setattr(ethtool, "whole_frames", lambda name: None)
    monkeypatch.setattr(net, "mac_of", lambda name: bytes.fromhex("020000000009"))

    def switch(*words: str) -> Said:
        status = cli.main(["switch", *words])
        return Said(status, *capsys.readouterr())

    return switch


@pytest.fixture
def tools(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scripts."""
    from tailbound.switch.p4.compile import Sizes
    from tailbound.wire.schema import VERDICTS, Verdict

    sizes = Sizes(slots=64)
    row = ["1" if verdict == Verdict.ABANDONED else "0" for verdict in range(VERDICTS)]
    monkeypatch.setenv("VERDICTS", ",".join(row * (sizes.jobs * (sizes.ranks + 1))))
    monkeypatch.setenv("CELLS", ", ".join(["7"] * sizes.slots))
    compiler = '#!/bin/sh\n[ "$1" = --version ] && exit\nwhile [ "$1" != -o ]; do shift; done\necho \'{}\' > "$2"\n'
    folder = tmp_path / "tools"
    for name, text in {"p4c-bm2-ss": compiler, "simple_switch": _SWITCH, "simple_switch_CLI": _CLI}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


P4 = (
    "p4", "lo", "--address", "198.18.252.1", "--slots", "64", "--thrift-port", "9123",
    "--rank", "198.18.0.1,02:02:02:02:02:02,lo", "--cookie", "7",
)  # fmt: skip


@pytest.mark.usefixtures("tools")
def test_a_switch_takes_a_job_and_ends_with_ctrl_c(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Process] = []

    def interrupted(process: Process) -> int:
        assert process.alive()
        ran.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(Process, "wait", interrupted)
    done = run(*P4)
    assert done.status == 0, done.error
    said = done.out.split()
    assert "TAILBOUND_SWITCH=198.18.252.1,rows=64,form=sums,codes=512,cookie=7" in said
    told = (tmp_path / "told").read_text()
    assert "forward.macs TailboundIngress.forward.send 02:02:02:02:02:02 => 0" in told
    assert "admit.join 198.18.252.1 5515 7 => 0 1 0 63" in told
    assert "switch 198.18.252.1 runs on lo: rows of 512 codes" in done.error
    assert "0 final, 64 open, 65 rows abandoned" in done.error
    (process,) = ran
    assert not process.alive()


@pytest.mark.usefixtures("tools")
def test_a_switch_that_ends_by_itself_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Process, "wait", lambda _: 3)
    done = run(*P4)
    assert done.status == 1
    assert "has ended with status 3" in done.error


@pytest.mark.parametrize("lacking", ["p4c-bm2-ss", "simple_switch", "simple_switch_CLI"])
def test_a_tool_that_is_missing_is_named_before_anything_is_changed(
    run: Run, tools: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tools / lacking).unlink()
    touched: list[str] = []
    monkeypatch.setattr(ethtool, "whole_frames", touched.append)
    monkeypatch.setenv("PATH", str(tools))
    said = run(*P4)
    assert said.status == 1
    assert f"{lacking} is not on PATH" in said.error
    assert touched == []

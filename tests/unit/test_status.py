"""Status files, metrics that are the numbers of stats(), and the rows of tailbound top."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from rich.console import Console

from support import MS, Trouble, await_that, gradients, patient, team
from tailbound.cli import cli, main
from tailbound.metrics import flatten as flatten_module
from tailbound.metrics.flatten import Metric, flatten
from tailbound.metrics.host import host_metrics
from tailbound.observe import status
from tailbound.top import COLUMNS, lines, table
from tailbound.wire.schema import MISSING, PacketType, Verdict

DEAD_PID = 4_194_303  # pid_max at most, taken by nobody in a test's lifetime


def report(rank: int = 0, **changes: Any) -> dict[str, Any]:
    peer = {
        "lateness_ms": 0.0, "rtt_us": 120.0, "rate_mbit_s": 0.0, "sent_packets": 10, "sent_bytes": 1000,
        "expected": 100, "taken": 96, "late": 1, "lost": 2, "absent": 1, "refused": 0, "repaired": 1, "suspect": "",
    }  # fmt: skip
    return {
        "pid": os.getpid(), "pidns": status.namespace(), "rank": rank, "ranks": 3, "cookie": "c0ffee00",
        "datapath": "udp", "time": time.time(), "monotonic": 100.0, "op": "3.1", "ops": 50, "ops_incomplete": 1,
        "ops_late": 0, "ops_skipped": 0, "ops_minority": 0, "p50_ms": 12.0, "p99_ms": 30.0, "delivered": 0.96,
        "deadlines_ms": {"d1": 10.0, "d2": 20.0, "q": 0.5}, "deadline_hits": 0,
        "overtime_ms": {"waited": 12.0, "answer": 7.0, "lack": 5.0, "lacked": 70.0},
        "map": {"id": 4, "owners": [0, 1]}, "behind": 0, "sent_bytes": 2000, "drops": {"LATE": 3},
        "lost_on_arrival": {}, "counters": {"clipped": 9}, "peers": {str(p): dict(peer) for p in range(3) if p != rank},
        "events": [{"monotonic": 99.0, "event": "suspect", "suspect": 2}], "event_counts": {"suspect": 1},
    } | changes  # fmt: skip


def put(folder: Path, name: str, content: Any) -> Path:
    path = folder / f"{name}.status.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_what_dead_processes_left_is_not_shown_and_is_swept(tmp_path: Path) -> None:
    put(tmp_path, "live", report(0))
    dead = put(tmp_path, "dead", report(1, pid=DEAD_PID))
    elsewhere = put(tmp_path, "elsewhere", report(2, pid=DEAD_PID, pidns="pid:[1]"))  # a container's: nobody can know
    assert [s["rank"] for s in status.read([tmp_path])] == [0, 2]
    status.sweep(tmp_path)
    assert not dead.exists()
    assert elsewhere.exists()


@pytest.mark.needs("root")
def test_root_may_share_a_folder(tmp_path: Path) -> None:
    """As deploy/tailbound.tmpfiles does; a folder that anybody could clear is refused still."""
    code = "import sys, pathlib; from tailbound.observe import status; where = pathlib.Path(sys.argv[1]); "
    code += "status.make_folder(where); (where / 'x.status.json').write_text('{}')"
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        folder.chmod(folder.stat().st_mode | 0o011)
    command = [sys.executable, "-c", code, tmp_path]
    for mode, wrong in ((0o777, "nor one that root shares (1777)"), (0o1777, "")):
        tmp_path.chmod(mode)
        done = subprocess.run(command, user=12346, group=12346, capture_output=True, text=True)
        assert (wrong in done.stderr, done.returncode == 0) == (True, not wrong)
    assert (tmp_path / "x.status.json").stat().st_uid == 12346


@pytest.mark.needs("prometheus")
def test_the_metrics_of_all_ranks_on_a_host(tmp_path: Path) -> None:
    """What `tailbound metrics` serves is what the files say; what is no status is left out."""
    from prometheus_client.parser import text_string_to_metric_families

    put(tmp_path, "a", report(rank=0))
    put(tmp_path, "b", report(rank=1, ops=70))
    put(tmp_path, "c", "no json")
    put(tmp_path, "d", report(rank=2, peers=None))
    put(tmp_path, "e", report(rank=3, time=time.time() - 100))
    done = CliRunner().invoke(cli, ["metrics", "--once", "--folder", str(tmp_path)])
    assert done.exit_code == 0, done.output
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(done.output)
        for sample in family.samples
    }
    job = ("job", "c0ffee00")
    assert values["tailbound_ops_total", job, ("rank", "0")] == 50
    assert values["tailbound_ops_total", job, ("rank", "1")] == 70
    assert ("tailbound_ops_total", job, ("rank", "2")) not in values
    assert [name for name, *labels in values if ("rank", "3") in labels] == ["tailbound_status_age_seconds"]
    assert values["tailbound_delivered_ratio", job, ("rank", "0")] == 0.96
    where = (("fate", "lost"), job, ("peer", "1"), ("rank", "0"))
    assert values["tailbound_rows_missing", *where] == 2
    # told before it happens: an increase from nothing to one is none to Prometheus
    assert values["tailbound_events_total", ("event", "keys_tried"), job, ("rank", "0")] == 0
    assert values["tailbound_packets_refused_total", job, ("rank", "0"), ("reason", "late")] == 3
    assert values["tailbound_sent_bytes_total", job, ("peer", "2"), ("rank", "0")] == 1000


ROOT = status.ROOT_FOLDER


@pytest.mark.parametrize(
    ("environment", "uid", "writes", "reads"),
    [
        ({"TAILBOUND_STATUS": "/somewhere"}, 0, "/somewhere", ["/somewhere"]),
        ({"TAILBOUND_STATUS": "off"}, 0, None, []),
        ({}, 0, ROOT, [ROOT, "1003/tailbound"]),  # and where other users do
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, 7, "/run/user/7/tailbound", ["/run/user/7/tailbound", ROOT]),
        ({"TMPDIR": "/tmp"}, 7, "/tmp/tailbound-7", ["/tmp/tailbound-7", ROOT]),
    ],
)
def test_where_a_rank_writes_and_a_reader_looks(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    environment: dict[str, str],
    uid: int,
    writes: Any,
    reads: list[Any],
) -> None:
    for name in ("TAILBOUND_STATUS", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(status, "USERS", tmp_path)
    (tmp_path / "1003/tailbound").mkdir(parents=True)
    assert status.folder() == (writes and Path(writes))
    assert status.folders() == [tmp_path / place for place in reads]


def test_a_writer_writes_and_takes_its_file_away_and_troubles_nobody_where_it_cannot(tmp_path: Path) -> None:
    writer = status.StatusWriter("a-0", lambda: {"rank": 0, "time": time.time()}, tmp_path, period=0.01)
    await_that(lambda: status.read([tmp_path]), "a status")
    assert status.read([tmp_path])[0]["pid"] == os.getpid()
    writer.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("no folder")
    writer = status.StatusWriter("a-0", dict, tmp_path / "file", period=0.01)
    assert writer._thread is not None
    writer._thread.join(30)
    assert not writer._thread.is_alive()
    writer.close()


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for folder in (tmp_path, tmp_path / "link"):
        with pytest.raises(PermissionError):
            status.make_folder(folder)


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"rank": "x", "pid": 1}', '{"rank": 0}', '{"rank": 0, "pid": 1, "time": [1]}'),
        *("[" * 100_000, "x" * (status.LARGEST + 1), '{"rank": 0, "pid": 1, "time": 1' + 400 * "0" + "}"),
    ],
)
def test_files_that_are_no_status_and_links_and_pipes_are_ignored(tmp_path: Path, content: str) -> None:
    put(tmp_path, "bad", content)
    (tmp_path / "link.status.json").symlink_to(put(tmp_path, "good", report()))
    os.mkfifo(tmp_path / "pipe.status.json")
    assert [s["rank"] for s in status.read([tmp_path])] == [0]
    status.sweep(tmp_path)
    assert (tmp_path / "bad.status.json").exists()


def cells(*statuses: dict[str, Any], before: tuple[dict[str, Any], ...] = ()) -> list[dict[str, str]]:
    """By column what the table shows of each status."""
    old = [{"age": 0.1} | one for one in before]
    found = lines([{"age": 0.1} | one for one in statuses], old)
    return [{c.name: cell.plain for c, cell in zip(COLUMNS, line.cells, strict=True)} for line in found]


def test_rates_come_from_two_readings_and_the_columns_of_rows_add_up() -> None:
    """Rows that a rule refused were in no column: expected - taken was not the sum of the others."""
    now = report(monotonic=102.0, ops=70, sent_bytes=2_002_000)
    now["peers"]["2"] |= {"expected": 250, "taken": 209, "late": 1, "lost": 9, "refused": 25, "absent": 6}
    (first,), (row,) = cells(report()), cells(now, before=(report(),))
    assert (row["op/s"], row["Mb/s"], row["now"]) == ("10.0", "8", "lost 2, refused 2, absent 2")
    assert (first["op/s"], first["now"]) == ("-", "late 1 2, lost 1 2, absent 1 2")
    assert (first["p99 ms"], first["D1/D2/q ms"], first["lost"]) == ("30.0", "10/20/0.5", "4")
    for each, missing in ((first, 8), (row, 45)):
        assert int(each["missing"]) == sum(int(each[fate]) for fate in MISSING) == missing


def test_the_table_says_what_to_do() -> None:
    """Advice is that of the verdicts and fates of the last reading, and nothing where all is well."""
    before, now = report(drops={"LATE": 3, "WRONG_MAP": 1}), report(drops={"LATE": 9, "WRONG_MAP": 2, "CORRUPT": 1})
    now["peers"]["1"] |= {"lost": 9}
    (line,) = lines([now | {"age": 0.1}], [before | {"age": 0.1}])
    assert [text.partition(":")[0] for text in line.advice] == ["lost", "CORRUPT", "WRONG_MAP"]
    assert Verdict.WRONG_MAP.advice in line.advice[2]
    (well,) = lines([before | {"age": 0.1}], [before | {"age": 0.1}])
    assert well.advice == ()


def test_what_others_write_does_not_end_a_reader_nor_speak_to_the_terminal(tmp_path: Path) -> None:
    (row,) = cells(report(op="\x1b[2J3.1", events=[{"event": "\x1b]0;x\x07late" + "y" * 999}]))
    assert (row["op"], row["last event"][:8], len(row["last event"]) <= 40) == ("[2J3.1", "]0;xlate", True)
    infinite = report(1, behind=math.inf, ops=math.inf) | {"age": 0.1}
    odd = report(2, cookie=["x"]) | {"age": 0.1}
    assert {row["rank"] for row in cells(report(0), infinite, odd, before=(odd,))} == {"0", "2"}
    put(tmp_path, "infinite", infinite)
    put(tmp_path, "odd", odd)
    put(tmp_path, "good", report(3))
    ops = [one.labels["rank"] for one in host_metrics([tmp_path]) if one.name == "tailbound_ops_total"]
    assert "3" in ops


@pytest.mark.parametrize(("width", "behind"), [(10, []), *((width, ["1", "2"]) for width in (40, 80, 132, 240))])
def test_rank_and_state_are_shown_at_any_width(width: int, behind: list[str]) -> None:
    rows = lines([report(rank, age=0.1, behind=behind) for rank, behind in enumerate((0, 3, 120))])
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table(rows, width=width))
    shown = console.export_text().splitlines()
    assert all(len(line) <= width for line in shown)
    assert [re.findall(r"\d+", line)[0] for line in shown if " behind" in line] == behind


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One reading, no rank at all, and readings until Ctrl-C."""
    put(tmp_path, "a", report(0))
    put(tmp_path, "b", report(1))
    monkeypatch.setenv("TAILBOUND_STATUS", str(tmp_path))
    assert main(["top", "--once", "--interval", "0.1"]) == 0
    assert "tailbound: 2 rank(s)" in capsys.readouterr().out
    monkeypatch.setattr("tailbound.top.time.sleep", Mock(side_effect=[None, None, KeyboardInterrupt]))
    assert main(["top"]) == 130
    assert "tailbound: 2 rank(s)" in capsys.readouterr().out
    monkeypatch.setenv("TAILBOUND_STATUS", str(tmp_path / "none"))
    assert main(["top", "--once"]) == 0
    assert "no rank of Tailbound writes its status" in capsys.readouterr().out


NUMEL = 8 * 64 * 256
RANKS = 3


@pytest.fixture(scope="module")
def stats() -> dict[str, Any]:
    """Of rank 1 of three over udp after some ops with losses."""
    with team(RANKS, patient(quiet=20 * MS, share_rows=False)) as whole:
        for member in whole.communicators:
            Trouble(5, loss=0.02, duplicate=0.02, types=frozenset({PacketType.RESULT})).attach(member)
        for op in range(4):
            whole.allreduce(gradients("U", RANKS, NUMEL, seed=op))
        return whole[1].stats()


def one(metrics: list[Metric], name: str, **labels: str) -> float:
    (value,) = [m.value for m in metrics if m.name == name and labels.items() <= m.labels.items()]
    return value


def test_metrics_are_the_numbers_of_stats(stats: dict[str, Any]) -> None:
    status, metrics = stats["status"], flatten(stats["status"])
    assert one(metrics, "tailbound_ops_total") == one(metrics, "tailbound_counter_total", counter="ops") == 4
    assert one(metrics, "tailbound_delivered_ratio") == stats["delivered"]
    assert one(metrics, "tailbound_op_seconds", quantile="0.99") == pytest.approx(status["p99_ms"] / 1000)
    d2 = one(metrics, "tailbound_deadline_seconds", deadline="d2")
    assert d2 == pytest.approx(status["deadlines_ms"]["d2"] / 1000)
    for peer in ("0", "2"):
        assert one(metrics, "tailbound_sent_bytes_total", peer=peer) == stats["sent"][peer]["bytes"] > 0
        expected = one(metrics, "tailbound_rows_expected_total", peer=peer)
        taken = one(metrics, "tailbound_rows_taken_total", peer=peer)
        missing = [m.value for m in metrics if m.name == "tailbound_rows_missing" and m.labels["peer"] == peer]
        books = [stats["ledger"][stage][peer] for stage in ("contributions", "results")]
        assert taken + sum(missing) == expected == sum(entry["expected"] for entry in books) > 0
        assert taken == sum(entry["taken"] for entry in books)
    shares = [m.value for m in metrics if m.name == "tailbound_owner_share_ratio"]
    assert sum(shares) == pytest.approx(1.0)
    refused = sum(m.value for m in metrics if m.name == "tailbound_packets_refused_total")
    assert refused == sum(stats["drops"].values()) > 0  # duplicates were made on purpose


def test_a_row_that_comes_after_its_op_leaves_no_counter_that_falls() -> None:
    """It was absent and is late: to Prometheus a counter that falls has begun anew, and counts twice."""
    entry = {"expected": 9, "taken": 7, "late": 0, "lost": 0, "refused": 0, "absent": 2, "repaired": 0}
    before, after = (
        {(m.name, *m.labels.values()): m.value for m in flatten({"rank": 0, "ranks": 2, "peers": {"1": entry | more}})}
        for more in ({}, {"late": 2, "absent": 0})
    )
    assert all(value <= after[key] for key, value in before.items() if key[0].endswith("_total"))
    assert before != after


def test_every_name_of_the_tables_finds_its_number(stats: dict[str, Any], repository: Path) -> None:
    """A place that no status has would leave its metric out without a word. docs/torch/metrics.md names them all."""
    rows = [*flatten_module._OF_RANK, *flatten_module._OF_PEER]
    metrics = flatten(stats["status"])
    found = {metric.name for metric in metrics}
    assert len(metrics) == len({(m.name, *m.labels.items()) for m in metrics}), "two of the same name and labels"
    assert {f"tailbound_{name}" for name, *_ in rows} <= found
    assert {place for _, place, *_ in flatten_module._BY_KEY} <= stats["status"].keys()
    page = (repository / "docs/torch/metrics.md").read_text()
    assert [name for name in sorted(found) if name.removeprefix("tailbound") not in page] == []


def test_a_suspect_and_one_that_has_gone_are_told_apart() -> None:
    metrics = flatten({"rank": 1, "ranks": 3, "peers": {"0": {"suspect": "cr"}, "2": {"suspect": "bye"}}})
    suspect = {m.labels["peer"]: m.value for m in metrics if m.name == "tailbound_peer_suspect"}
    assert suspect == {"0": 1, "2": 0}
    assert [m.value for m in metrics if m.name == "tailbound_peer_gone"] == [0, 1]

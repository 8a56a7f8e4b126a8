"""The command line: quick help, errors in one line, exit statuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import click
import pytest

from tailbound import cli
from tailbound.errors import AttachError, ConfigError, TailboundError
from tailbound_lab import cli as laboratory


def verbs(group: click.Group, *above: str) -> Iterator[list[str]]:
    """All of them, with what comes before them."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield [*above, name]
        if isinstance(command, click.Group):
            yield from verbs(command, *above, name)


def test_every_verb_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    found = list(verbs(cli.cli))
    assert ["switch", "job", "add"] in found
    for verb in found:
        assert cli.main([*verb, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"Usage: tailbound {' '.join(verb)}")


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("from tailbound.cli import main; assert main(['--help']) == 0", "numpy numba torch rich pyroute2 scapy"),
        # what compiles is loaded by jobs alone, and by nobody who has only to know how a packet or a map is laid out
        ("import tailbound_lab.lab.cluster, tailbound_lab.lab.launch", "numba torch"),
        ("import tailbound.doctor, tailbound.datapath.xdp, tailbound.kernel.fanout", "numba torch"),
    ],
    ids=["help", "labs", "attach and doctor"],
)
def test_nothing_heavy_is_imported_for(code: str, heavy: str) -> None:
    check = f"import sys; {code}; heavy = set({heavy.split()}) & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", check], check=True, stdout=subprocess.DEVNULL)


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "tailbound", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tailbound")


ADVICE = "eth7 said no: try eth8"


@pytest.mark.parametrize(
    ("error", "status"),
    [(TailboundError(ADVICE), 1), (ConfigError(ADVICE), 2), (AttachError(ADVICE), 1), (KeyboardInterrupt(), 130)],
)
def test_our_errors_are_one_line_and_an_interrupt_is_none(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tailbound.doctor.report.examine", Mock(side_effect=error))
    assert cli.main(["doctor"]) == status
    assert capsys.readouterr().err.strip() == ("" if status == 130 else f"error: {ADVICE}")


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailbound.doctor.report.examine", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


@pytest.mark.parametrize(
    ("text", "size"), [("25MiB", 25 << 20), ("1.5 kib", 1536), ("26MB", 26_000_000), ("4", 4), ("100", 100)]
)
def test_sizes_as_people_write_them(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr("tailbound_lab.bench.allreduce.run", lambda spec, **options: seen.update(options, spec=spec))
    assert cli.main(["bench", "allreduce", "--size", text, "--size", "1MiB", "--workers", "3", "--loss", "1%"]) == 0
    assert seen["sizes"] == (size, 1 << 20)
    assert (seen["spec"].workers, seen["spec"].loss, seen["vs"]) == (3, 0.01, ["gloo"])


@pytest.mark.parametrize("text", ["", "3", "-1", "25 MB/s", "25Mi", "1e9"])
def test_a_size_that_cannot_be_is_a_usage_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "allreduce", "--size", text]) == 2
    assert "write for example 25MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("builds", "verbs"),
    [
        (True, ["demo --quick", "lab run -n 2 -- python train.py --help", "bench allreduce", "bench train --quick"]),
        (False, ["bench kernel", "bench", "bench tail --help", "demo -h", "lab run --help", "lab clean", "doctor", ""]),
    ],
)
def test_only_verbs_that_build_a_lab_are_started_in_a_user_namespace(builds: bool, verbs: list[str]) -> None:
    assert [laboratory.builds_a_lab(words.split()) for words in verbs] == [builds] * len(verbs)


@pytest.mark.parametrize(
    ("words", "privileged", "refused", "restarts"),
    [
        (["demo", "--bad"], False, False, True),
        (["demo", "--bad"], True, False, False),
        (["demo", "--bad"], False, True, False),
        (["top", "--bad"], False, False, False),
    ],
)
def test_who_may_not_build_a_lab_is_started_again_once(
    monkeypatch: pytest.MonkeyPatch, words: list[str], privileged: bool, refused: bool, restarts: bool
) -> None:
    restarted = list[bool]()
    monkeypatch.setattr(sys, "argv", ["tailbound", *words])
    monkeypatch.setattr(laboratory, "has_capability", lambda *names: privileged)
    monkeypatch.setattr("tailbound_lab.lab.user_namespace.restart", lambda: restarted.append(True))
    monkeypatch.setenv("TAILBOUND_STATUS", "/of/this/user")
    if refused:
        monkeypatch.setenv("TAILBOUND_LAB_REFUSED", "Operation not permitted")
    assert cli.main() == 2
    assert cli.main(words) == 2, "a call from Python stays in its process"
    assert restarted == [True] * restarts

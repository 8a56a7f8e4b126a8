"""Teams of communicators in the namespaces of a lab, and what commands in them say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from support import Team, await_that, team
from tailbound_lab.lab.cluster import Cluster


def lab_team(
    lab: Cluster, settings: dict[str, Any], *, datapath: str = "xdp", **more: Any
) -> contextlib.AbstractContextManager[Team]:
    """``support.team`` with one rank in every worker's namespace, all in this process."""
    return team(
        len(lab.workers), {"port": lab.spec.port} | settings, datapath=datapath, interface=lab.workers[0].interface,
        within=lambda rank, make: lab.run(rank, make, sysfs=True), **more,
    )  # fmt: skip


def said_by(
    lab: Cluster, commands: Sequence[Sequence[str]], seconds: float, *, places: int = 1, **env: str
) -> list[str]:
    """What ranks print that run ``commands``, ``places`` of them in each worker, within ``seconds`` all together.

    Raises:
        AssertionError: one has not ended well; with what all have printed until then.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks, said, late, end = [], [], [], time.monotonic() + seconds
    for rank, command in enumerate(commands):
        place = {"RANK": rank, "LOCAL_RANK": rank % places, "WORLD_SIZE": len(commands), "LOCAL_WORLD_SIZE": places}
        place = {name: str(value) for name, value in place.items()} | env
        ranks.append(lab.popen(rank // places, [str(word) for word in command], env=place, **pipes))
    for rank, worker in enumerate(ranks):
        try:
            said.append(worker.communicate(timeout=max(0.0, end - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            late.append(rank)
            os.killpg(worker.pid, signal.SIGKILL)
            said.append(worker.communicate()[0])
    codes = [worker.returncode for worker in ranks]
    assert not any(codes), "\n".join([f"exit codes {codes}, not over after {seconds:g} s: {late}", *said])
    return said


def told_by(lab: Cluster, script: str, *arguments: str) -> tuple[Any, str, str]:
    """Runs ``script`` in the namespace of the first worker: the last line it prints, as JSON; all it prints; errors."""
    argv = [sys.executable, "-c", script, *arguments]
    process = lab.popen(0, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, out + err
    return json.loads(out.splitlines()[-1]), out, err


def chosen(job: Team, *results: str) -> list[dict[str, Any]]:
    """Waits until the ranks send their results as told; their choices."""

    def choices() -> list[dict[str, Any]]:
        return [member.stats()["choice"] for member in job.communicators]

    await_that(lambda: [choice["result"] for choice in choices()] == list(results), f"{results} are chosen")
    return choices()

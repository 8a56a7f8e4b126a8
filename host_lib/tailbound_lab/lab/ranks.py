"""The one way to start commands in a lab: one process a rank, their output, and the straggler's stops."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.output import Streams
from tailbound_lab.lab.straggler import Freezer, run_times


class Ranks:
    """Processes of a lab, by rank; ``close`` kills what still runs.

    Lines of their standard output and standard error go to ``out`` and ``err``, with the rank in front, whenever
    ``streams`` is pumped.
    """

    def __init__(self, lab: Cluster, out: Console, err: Console) -> None:
        self._lab = lab
        self.streams = Streams(lab.spec.workers, out, err)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._freezer: Freezer | None = None

    def start(self, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
        """Start the next rank; the last one starts the stops of a straggler. ``options`` are those of ``Popen``."""
        spec, rank = self._lab.spec, len(self.processes)
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = self._lab.popen(rank, argv, env, **pipes, **options)
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stderr is not None
        self.streams.add(rank, process.stdout, error=False)
        self.streams.add(rank, process.stderr, error=True)
        straggler = spec.straggler
        if rank == spec.workers - 1 and straggler is not None and straggler.every_ms is not None:
            slow = self.processes[straggler.rank].pid
            self._freezer = Freezer(slow, straggler.ms / 1000, run_times(straggler, spec.seed))

    def close(self) -> None:
        """Kill what still runs, and wait for it; may be called twice."""
        if self._freezer is not None:
            self._freezer.close()
            self._freezer = None
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.streams.close()

"""What the benchmarks of all-reduces begin with: compiled code, a place for the ranks, and a common start."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from tailbound.errors import ConfigError
from tailbound.prepare import Preparation
from tailbound_lab.bench.places import Place, open_place
from tailbound_lab.bench.start import StartLine
from tailbound_lab.lab.spec import LabSpec


@contextmanager
def prepared(
    spec: LabSpec, datapath: str, console: Console, per_host: int = 1
) -> Iterator[tuple[Place, str | None, Path]]:
    """Compiles what is not compiled yet, then ``open_place``; says what it does.

    Yields:
        The place, why it is not a lab (None: it is one), and the file of the ranks' ``StartLine``.

    Raises:
        ConfigError: a straggler that computes longer in each step: an all-reduce alone has no steps.
        ConfigError, CapabilityError: see ``open_place``.
    """
    if spec.straggler is not None and spec.straggler.every_ms is None:
        raise ConfigError(
            f"a straggler of {spec.straggler} computes longer in each step, and all-reduces alone have none: give "
            f"RANK:MS:EVERY, such as {spec.straggler.rank}:{spec.straggler.ms:g}:{4 * spec.straggler.ms:g}"
        )
    with tempfile.TemporaryDirectory(prefix="tailbound-bench-") as folder, Preparation() as preparation:
        line = Path(folder, "start")
        StartLine.create(line, spec.workers * per_host)
        console.print("preparing: compiling what is not compiled yet", highlight=False)
        preparation.wait()
        with open_place(spec, datapath) as (place, why_not):
            if why_not is not None:
                console.print(f"no lab, ranks run on loopback over udp: {why_not}", highlight=False, soft_wrap=True)
            yield place, why_not, line

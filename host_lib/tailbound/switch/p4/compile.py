"""From the sources in ``p4/`` to the program that ``simple_switch`` runs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

from tailbound.errors import CapabilityError, ConfigError
from tailbound.kernel import cache
from tailbound.kernel.cache import assets
from tailbound.switch.p4.tools import COMPILER, tool
from tailbound.wire.schema import MAX_RANKS, SWITCH_JOBS, WIDTH_STEP

_MAIN = "tailbound.p4"


@dataclass(frozen=True)
class Sizes:
    """What the program is compiled for; the defaults are those of ``p4/sizes.p4``.

    Attributes:
        slots: of all jobs together.
        jobs: at once.
        ranks: workers of a job at most.
        ports: of the switch, numbered from 0.
        codes: of the widest contribution. 512 is what ``simple_switch`` can do: a packet grows by as many bytes as it
            has codes when it becomes a result, and bmv2 keeps room for 512.

    Raises:
        ConfigError: an invalid size.
    """

    slots: int = 4096
    jobs: int = SWITCH_JOBS
    ranks: int = 64
    ports: int = 64
    codes: int = 512

    def __post_init__(self) -> None:
        most = {"slots": 1 << 24, "jobs": SWITCH_JOBS, "ranks": MAX_RANKS - 1, "ports": 511, "codes": 512}
        for name, limit in most.items():
            if not 1 <= getattr(self, name) <= limit:
                raise ConfigError(f"{getattr(self, name)} {name} in a P4 switch: give 1..{limit}")
        if self.codes % WIDTH_STEP:
            raise ConfigError(f"rows of {self.codes} codes: give a multiple of {WIDTH_STEP}")

    @property
    def defines(self) -> list[str]:
        """For the compiler."""
        return [f"-DTB_{f.name.upper()}={getattr(self, f.name)}" for f in fields(self)]


def compile_switch(sizes: Sizes | None = None) -> bytes:
    """The compiled program (JSON of bmv2); kept between processes.

    Raises:
        CapabilityError: no compiler, or it refuses the sources.
    """
    defines = (sizes or Sizes()).defines
    compiler, folder = tool(COMPILER), assets("p4")
    version = _run([compiler, "--version"])
    sources = [part for path in sorted(folder.glob("*.p4")) for part in (path.name, path.read_bytes())]
    name = cache.key(["p4", version, *defines, *sources])

    def make() -> bytes:
        with tempfile.TemporaryDirectory(prefix="tailbound-p4-") as where:
            out = Path(where) / "tailbound.json"
            _run([compiler, *defines, "-I", str(folder), "-o", str(out), str(folder / _MAIN)])
            return out.read_bytes()

    return cache.get(name, make)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        first = re.search(r"^.*error.*$", done.stderr, re.MULTILINE)
        detail = first[0] if first else done.stderr.strip()[-400:] or f"exit status {done.returncode}"
        raise CapabilityError(
            f"{' '.join(command[:1])} does not compile the P4 switch (see p4/README.md for what is needed): {detail}"
        )
    return done.stdout

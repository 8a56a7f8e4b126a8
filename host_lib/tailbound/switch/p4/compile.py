"""From the sources in ``p4/`` to the program that ``simple_switch`` runs."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tailbound.errors import ConfigError
from tailbound.kernel import cache
from tailbound.kernel.cache import assets
from tailbound.switch.p4.tools import COMPILER, tool
from tailbound.wire.schema import MAX_RANKS, SWITCH_JOBS, WIDTH_STEP

_MAIN = "tailbound.p4"
_HELP = "see p4/README.md for what is needed"


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
    version = cache.run([compiler, "--version"], _HELP)
    sources = [part for path in sorted(folder.glob("*.p4")) for part in (path.name, path.read_bytes())]

    def command(out: str) -> list[str]:
        return [compiler, *defines, "-I", str(folder), "-o", out, str(folder / _MAIN)]

    return cache.get(cache.key(["p4", version, *defines, *sources]), lambda: cache.compiled(command, _HELP))

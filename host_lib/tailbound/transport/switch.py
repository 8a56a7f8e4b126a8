"""A job's aggregating switch: where it is, what it can hold, and whether rows go there while it may be silent.

A switch that restarts, or that no rank reaches, sends nothing: every op then lasts until its deadline and brings
nothing. After a few such ops the ranks agree on an owner map without the switch, and try it again after a rest, which
doubles each time that this was too early. So a switch that is gone for good costs a few ops in ever more minutes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from tailbound.errors import ConfigError
from tailbound.transport.backoff import Backoff, Policy
from tailbound.wire.address import is_ipv6, words_of
from tailbound.wire.schema import WIDTH_STEP, Flag

#: Forms of results: mean codes, or sums with their count.
FORMS = {"mean": Flag.SWITCHED, "sums": Flag.SUMS}
_ROWS_LEAST = 64


@dataclass(frozen=True)
class Switch:
    """A job's switch; it takes part as one more rank, which owns every row and contributes none.

    Attributes:
        address: IP address that contributions go to and results come from.
        port: its UDP port; 0: that of the job.
        rows: slots of the job in the switch, a power of two.
        form: ``mean``: results are mean codes (an XDP switch); ``sums``: u16 sums (P4), rows then hold half the codes.
        codes: the widest row that the switch takes, a multiple of 64; 0: as wide as packets let it be.
        cookie: that the switch knows the job by; it is drawn where the job's entry is made. 0: rank 0 draws one.

    Raises:
        ConfigError: a setting that cannot be.
    """

    address: str
    port: int = 0
    rows: int = 8192
    form: str = "mean"
    codes: int = 0
    cookie: int = 0

    def __post_init__(self) -> None:
        try:
            words_of(self.address)
        except OSError:
            raise ConfigError(f"switch {self.address!r}: give an IP address in numbers") from None
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"switch port {self.port}: give 0..65535")
        if self.rows < _ROWS_LEAST or self.rows & (self.rows - 1):
            raise ConfigError(f"{self.rows} slots in the switch: give rows=, a power of two of at least {_ROWS_LEAST}")
        if self.form not in FORMS:
            raise ConfigError(f"form {self.form!r} of a switch's results: give form= one of {', '.join(FORMS)}")
        if self.form == "sums" and is_ipv6(self.address):
            raise ConfigError(
                f"the switch at {self.address} sends sums, as the P4 switch does, and that one is for IPv4: give it an "
                "address of IPv4, or take an XDP switch"
            )
        if self.codes < 0 or self.codes % WIDTH_STEP:
            raise ConfigError(f"rows of {self.codes} codes in the switch: give codes=, a multiple of {WIDTH_STEP}")
        if not 0 <= self.cookie < 1 << 32:
            raise ConfigError(f"cookie {self.cookie} of the switch: give cookie=, 1..4294967295")

    def width(self, width: int) -> int:
        """Widest row of a contribution where packets hold ``width`` codes.

        Raises:
            ConfigError: no row fits.
        """
        most = self.codes or width
        if self.form == "mean":
            return min(width, most)
        half = width // 2 // WIDTH_STEP * WIDTH_STEP
        if not half:
            raise ConfigError(
                f"payload width {width} is too small for a switch that sends sums, two bytes a code: raise the "
                f"MTU so that {2 * WIDTH_STEP} bytes fit"
            )
        return min(half, most)


def parse(text: str) -> Switch:
    """The switch that ``tailbound switch job add`` has printed: its address, and perhaps more; see ``GIVE``.

    Raises:
        ConfigError: a part that cannot be.
        ValueError: another form.
    """
    where, *given = text.split(",")
    if where.startswith("["):
        host, _, port = where[1:].partition("]:")
        host = host.removesuffix("]")
    else:
        host, _, port = (where, "", "") if where.count(":") > 1 else where.partition(":")
    parts = (part.partition("=") for part in given)
    more = {name.strip(): value.strip() if name == "form" else int(value, 0) for name, _, value in parts}
    if unknown := more.keys() - {each.name for each in fields(Switch)[2:]}:
        raise ValueError(unknown)
    return Switch(host, int(port or 0), **more)  # type: ignore[arg-type]


#: What ``parse`` takes.
GIVE = "ADDRESS, ADDRESS:PORT or [IPV6]:PORT, and then what `tailbound switch job add` says"


#: How a switch that is silent is tried again.
RESTS = Policy(5_000_000_000, 320_000_000_000)


class Fallback:
    """One rank's wish whether rows go to the switch, or from rank to rank; pure, times in ns.

    Args:
        after: ops running without any result that are enough.
    """

    def __init__(self, after: int) -> None:
        self._after = after
        self._rests = Backoff(RESTS)
        self._left, self._before = False, 0

    def update(self, silent_ops: int, switched: bool, now: int) -> bool:
        """Takes the silent ops running, and whether the map in force names the switch.

        Returns:
            Whether rows should go to the switch.
        """
        self._before = min(self._before, silent_ops)
        if self._left and now >= self._rests.due:
            self._left, self._before = False, silent_ops
        elif not self._left and switched and silent_ops - self._before >= self._after:
            if self._rests.asked and now - self._rests.due >= RESTS.wait(self._rests.asked):
                self._rests.asked = 0  # it was not too early
            self._rests.ask(now)
            self._left = True
        return not self._left

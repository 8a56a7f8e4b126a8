"""Settings of a job's transport. ``settings.kinds`` checks each value, and ``Config`` how they fit together."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, TypeAlias

from tailbound.errors import ConfigError
from tailbound.wire.address import is_ipv6, words_of
from tailbound.wire.bits import Bits, bits_text
from tailbound.wire.schema import DEFAULT_PORT as DEFAULT_PORT
from tailbound.wire.schema import (
    ETHERNET_BYTES,
    HEADER_BYTES,
    IPV4_BYTES,
    MAX_RANKS,
    TIME_UNIT_US,
    UDP_BYTES,
    WIDTH_STEP,
    Flag,
)

MS = 1_000_000
#: Ways of results that may be asked for.
AskedResult: TypeAlias = Literal["auto", "peers", "fanout", "multicast"]
#: Shortest deadline: threads and interrupts are late by this much on any machine.
FLOOR = 10 * MS
#: MiB of a ring at most that follows a model. With two ranks the rings take twice as much, for `xdp` all of it at once
#: and of the kernel, which cannot swap it: more is for the user to ask for.
RING_MOST = 512
#: Widest row: what a jumbo frame of 9000 bytes takes.
WIDTH_MOST = 8896
#: Width of rows on loopback, whose MTU says nothing about a network.
WIDTH_LOOPBACK = 1408
#: Ports that ``udp`` may take from a given one on: several ranks, models and jobs of a host share its address.
PORTS = 64
#: Longest D1 in ns that a header can say; a longer one counts as this one.
DEADLINE_MOST = 0xFFFF * TIME_UNIT_US * 1000


@dataclass(frozen=True)
class Limits:
    """Fractions of an op's rows beyond which an owner that lost them acts; None: never.

    ``host_lib/core/close.c`` judges by them. Every row has one owner, and an owner's verdict travels in the flags of
    its result rows: so all ranks that have a row of it decide alike, without a word more. Loss here is what is missing
    of ranks that did bring rows, or are waited for and said that they had sent them (clock-15).

    Attributes:
        skip: no rank applies the op: its average is zero and flagged ``skipped``.
        stop: the next launch raises ``TransportError`` on every rank.
    """

    skip: float | None = 0.80
    stop: float | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"safeguard {one.name} is {value}: give a fraction of 0..1, or None for never")

    def text(self) -> str:
        """As ``TAILBOUND_SAFEGUARD`` takes it."""
        given = ((one.name, getattr(self, one.name)) for one in fields(self))
        return ",".join(f"{name}={'never' if value is None else value}" for name, value in given)


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


def parse_switch(text: str) -> Switch:
    """The switch that ``tailbound switch job add`` has printed: its address, and perhaps more; see ``GIVE_SWITCH``.

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


#: What ``parse_switch`` takes.
GIVE_SWITCH = "ADDRESS, ADDRESS:PORT or [IPV6]:PORT, and then what `tailbound switch job add` says"


def row_width(asked: int, mtu: int | None, *, linear: int | None = None, ip: int = IPV4_BYTES) -> int:
    """Payload width W of a job in codes (1408 at an MTU of 1500; codec-1).

    Args:
        asked: the most that is wanted; 0: as wide as the path takes.
        mtu: of the path, in bytes; None: loopback.
        linear: for the xdp datapath, bytes of a frame that the driver hands over in one piece (``kernel.linear``).
        ip: bytes of an IP header.

    Raises:
        ConfigError: the MTU holds no row.
    """
    if mtu is None:
        return asked or WIDTH_LOOPBACK
    if linear is not None:
        mtu = min(mtu, linear - ETHERNET_BYTES)
    overhead = ip + UDP_BYTES + HEADER_BYTES
    width = (mtu - overhead) // WIDTH_STEP * WIDTH_STEP
    if width < WIDTH_STEP:
        raise ConfigError(f"MTU {mtu} is too small for one row: give at least {overhead + WIDTH_STEP} bytes")
    return min(asked or WIDTH_MOST, width, WIDTH_MOST)


@dataclass(frozen=True)
class Config:
    """What one rank needs to know; every time in nanoseconds.

    A field that is named like an option of ``settings.table`` is that option; the deadlines are ``deadline_ms``, and
    ``patience`` makes ``start_max``, ``stage_max``, ``floor`` and ``insist``. Simulations and tests alone change
    ``quiet``, ``rotate``, ``codec_threads`` and ``first_step``.

    Attributes:
        rank, ranks: this rank and the world size.
        width: most codes of a row; 0: as many as the path's MTU takes.
        ring_mib: MiB of the result ring; the least where ``step`` is known.
        step: bytes of codes that a step averages; the ring follows them (``ring``). 0: ``ring_mib`` is its size.
        deadline_1, deadline_2: D1 and D2 of clock-4 and clock-11; 0: learned.
        start_max: least D_start of clock-3.
        stage_max: clock-4; no stage lasts longer, whatever arrives.
        floor: clock-36.
        quiet: q of clock-10; 0: learned.
        suspect_after: stages missed by a rank before it is suspected (clock-14).
        insist, hold_max: clock-35 and clock-16.
        share_rows: clock-22.
        rate: bytes per second of this rank's link; 0: what its driver says.
        switch: the aggregating switch that owns the rows; None: ranks own them.
        first_step: step number the job starts with.
    """

    rank: int
    ranks: int
    port: int = 0
    width: int = 0
    mtu: int = 0
    ring_mib: float = 64.0
    step: int = 0
    deadline_1: int = 0
    deadline_2: int = 0
    start_max: int = 1000 * MS
    stage_max: int = 2000 * MS
    floor: int = FLOOR
    insist: int = 0
    quiet: int = 0
    suspect_after: ClassVar[int] = 3
    hold_max: int = 60_000 * MS
    rotate: bool = True
    safeguard: Limits = field(default_factory=Limits)
    share_rows: bool = True
    result: AskedResult = "auto"
    rate: float = 0.0
    dscp: int = 0
    switch: Switch | None = None
    codec_threads: int = 0
    key_file: str = ""
    bits: Bits = 8
    first_step: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ConfigError(f"world size {self.ranks}: give 1..{MAX_RANKS}")
        if self.switch is not None and self.ranks + 1 > MAX_RANKS:
            raise ConfigError(
                f"{self.ranks} workers and their switch are more than {MAX_RANKS} ranks: run fewer, or without the "
                "switch"
            )
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(f"rank {self.rank} of world size {self.ranks}: give 0..{self.ranks - 1}")
        if self.keyed and self.switch is not None:  # auth-7
            raise ConfigError(
                "a switch makes new rows and has no key, so forged packets would look like its own: train without the "
                "switch, or without a key (docs/security.md)"
            )
        if self.deadline_1 > self.stage_max or self.deadline_2 > self.stage_max:
            most = f"{self.stage_max / MS:g} ms, the most that patience leaves"
            raise ConfigError(f"deadline_ms is longer than {most}: give shorter ones, or more patience")

    @property
    def bound(self) -> int:
        """Longest time in ns from an op's launch to its end, decode apart (clock-12, clock-35)."""
        return self.start_max + 2 * self.stage_max + self.insist

    def ring(self, width: int) -> float:
        """MiB of the result ring for rows of ``width`` codes: where the step is known, two steps, up to ``RING_MOST``.

        Then a whole step is in flight at once, and the one before it is kept for who is behind. A step has some more
        rows than its codes fill: tensors begin rows of their own, and flat ops end with whole groups.
        """
        row = self.switch.width(width) if self.switch is not None else width
        rows = 1 << (2 * 17 * self.step // (16 * row)).bit_length()
        while rows * width > RING_MOST << 20:
            rows >>= 1
        return max(self.ring_mib, rows * width / 2**20) if self.step else self.ring_mib

    @property
    def keyed(self) -> bool:
        """Whether this job has a key."""
        return bool(self.key_file)

    def common(self) -> dict[str, str]:
        """What must be equal on all ranks, by the name of the hook's option and in words: else they would diverge.

        Of ``result`` only whether it is multicast: who is not in the group would get no results.
        """
        return {
            "key_file": "given" if self.keyed else "none",
            "bits": bits_text(self.bits),
            "result": "multicast" if self.result == "multicast" else "any but multicast",
            "safeguard": self.safeguard.text(),
            "share_rows": "on" if self.share_rows else "off",
        }

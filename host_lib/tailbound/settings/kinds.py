"""What a setting may be: how its text in the environment is read, and what to say of a wrong one. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from tailbound.errors import ConfigError
from tailbound.transport.config import Limits
from tailbound.wire.bits import BITS, bits_text

_SWITCH = dict.fromkeys(("1", "on", "true", "yes"), True) | dict.fromkeys(("0", "off", "false", "no"), False)


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        give: what may be given, after the word "give".
        parse: text to value; raises ValueError, or KeyError where it looks the text up.
    """

    give: str
    parse: Callable[[str], Any]

    def show(self, value: Any) -> str:
        """``value`` as it would be given."""
        if isinstance(value, tuple):
            return ",".join(self.show(part) for part in value)
        if isinstance(value, dict):
            return ",".join(f"{name}={'never' if part is None else part}" for name, part in value.items())
        if isinstance(value, Limits):
            return value.text()
        if isinstance(value, bool):
            return "on" if value else "off"
        return f"{value:g}" if isinstance(value, float) else str(value)


def choice(*values: str | int) -> Kind:
    """One of some words in lower case, or of some numbers."""
    named = {str(value): value for value in values}
    return Kind(f"one of {', '.join(named)}", lambda text: named[text.lower()])


def words(what: str) -> Kind:
    """Any text; whoever uses it says whether it will do."""
    return Kind(what, str)


def integer(least: int, most: int | None = None) -> Kind:
    """A whole number, in decimal or with 0x."""

    def parse(text: str) -> int:
        value = int(text, 0)
        if value < least or (most is not None and value > most):
            raise ValueError(text)
        return value

    return Kind(f"a whole number of at least {least}" if most is None else f"a whole number of {least}..{most}", parse)


def number(above: float, *, inclusive: bool = False) -> Kind:
    """A number; ``inclusive``: or ``above`` itself."""

    def parse(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and (value > above or (inclusive and value == above))):
            raise ValueError(text)
        return value

    return Kind(f"{above:g} or more" if inclusive else f"a number above {above:g}", parse)


def _deadlines(text: str) -> tuple[float, float] | None:
    if text.lower() == "learned":
        return None
    first, second = (float(part) for part in text.split(","))
    if not (math.isfinite(first + second) and min(first, second) > 0):
        raise ValueError(text)
    return first, second


def _patience(text: str) -> float:
    return {"rack": 1.3, "cloud": 5.2, "wan": 26.0}.get(text.lower()) or float(number(above=0).parse(text))


def _limits(text: str) -> Limits:
    known = [field.name for field in fields(Limits)]
    found: dict[str, float | None] = {}
    for part in text.split(","):
        name, equals, value = (x.strip() for x in part.partition("="))
        if not equals or name not in known:
            raise ValueError(text)
        found[name] = None if value.lower() == "never" else float(value)
    return Limits(**found)


_BITS = {bits_text(bits): bits for bits in BITS}
_RATE = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*(?:([kmgt]?)bit(?:/s)?)?", re.IGNORECASE)
_RATE_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_rate(text: str) -> int:
    """Bits per second of ``1gbit``, ``2.5gbit``, ``800kbit``, ``64000`` (powers of 1000, as tc has it).

    Raises:
        ConfigError: anything else, or below 8 kbit or above 400 gbit.
    """
    match = _RATE.fullmatch(text.strip())
    rate = int(float(match[1]) * _RATE_FACTORS[(match[2] or "").lower()]) if match else 0
    if not 8_000 <= rate <= 400 * 10**9:
        raise ConfigError(f"{text!r} is not a rate of 8kbit..400gbit: write for example 1gbit, 500mbit or 2.5gbit")
    return rate


BITS_KIND = Kind("one of " + " or ".join(_BITS), lambda text: _BITS[text.replace(" ", "").strip("()")])
ON_OFF = Kind("one of on, off", lambda text: _SWITCH[text.lower()])
DEADLINES = Kind("two numbers of milliseconds above 0, as in 20,40, or learned", _deadlines)
PATIENCE = Kind("rack, cloud, wan, or seconds above 0", _patience)
RATE = Kind("a rate as in 25gbit or 500mbit", parse_rate)
LIMITS = Kind("NAME=VALUE,... of " + ", ".join(field.name for field in fields(Limits)), _limits)

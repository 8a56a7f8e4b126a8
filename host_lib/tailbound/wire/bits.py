"""How many bits codes have: one number for both ways, or (of contributions, of results)."""

from __future__ import annotations

import operator
from typing import TypeAlias

from tailbound.errors import ConfigError

Bits: TypeAlias = int | tuple[int, int]
#: What there is.
BITS: tuple[Bits, ...] = (16, 8, (4, 8))


def as_bits(given: object) -> Bits:
    """One of BITS: a number, numpy's too, or a pair, which JSON and YAML have as a list.

    Raises:
        ConfigError: ``given`` is none of them.
    """
    try:
        plain = tuple(map(operator.index, given)) if isinstance(given, (tuple, list)) else operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        plain = -1
    for bits in BITS:
        if bits == plain:
            return bits
    raise ConfigError(f"bits={given}: give one of {', '.join(map(str, BITS))}")


def both_ways(bits: Bits) -> tuple[int, int]:
    """Bits of a contribution's code and of a result's.

    Raises:
        ConfigError: ``bits`` are none of BITS.
    """
    plain = as_bits(bits)
    return (plain, plain) if isinstance(plain, int) else plain


def bits_text(bits: Bits) -> str:
    """``bits`` as they are given in a variable: ``8``, or ``4,8``."""
    return str(bits) if isinstance(bits, int) else ",".join(map(str, bits))


def number_of(bits: Bits) -> int:
    """One number of five bits that says what ``bits`` are."""
    up, down = both_ways(bits)
    return up | down

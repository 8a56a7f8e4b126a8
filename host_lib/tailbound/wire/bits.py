"""How many bits codes have: one number for both ways, or (of contributions, of results)."""

from __future__ import annotations

import operator
from typing import TypeAlias

from tailbound.errors import ConfigError

Bits: TypeAlias = int | tuple[int, int]
#: What there is.
BITS: tuple[Bits, ...] = (16, 8, 4, (4, 8))


def both_ways(bits: Bits) -> tuple[int, int]:
    """Bits of a contribution's code and of a result's.

    Raises:
        ConfigError: ``bits`` are none of BITS.
    """
    try:  # numbers of numpy, and lists, as YAML has them
        plain = tuple(map(operator.index, bits)) if isinstance(bits, (tuple, list)) else operator.index(bits)
    except TypeError:
        plain = -1
    if plain not in BITS:
        raise ConfigError(f"bits={bits}: give one of {', '.join(map(str, BITS))}")
    return (plain, plain) if isinstance(plain, int) else (plain[0], plain[1])


def bits_text(bits: Bits) -> str:
    """``bits`` as they are given in a variable: ``8``, or ``4,8``."""
    return str(bits) if isinstance(bits, int) else ",".join(map(str, bits))


def bits_told(bits: Bits) -> int | str:
    """``bits`` as figures say them, in JSON, too: a number, or ``4,8``."""
    return bits if isinstance(bits, int) else bits_text(bits)


def number_of(bits: Bits) -> int:
    """One number of five bits that says what ``bits`` are."""
    up, down = both_ways(bits)
    return up | down


_BY_NUMBER = {number_of(bits): bits for bits in BITS}


def bits_numbered(number: int) -> Bits:
    """What ``number_of`` was given.

    Raises:
        ConfigError: no such bits.
    """
    if number not in _BY_NUMBER:
        raise ConfigError(f"{number} is the number of no bits that codes may have")
    return _BY_NUMBER[number]

"""The header as a scapy layer, for tests and, in a checkout, for a packet capture; derived from the schema at import.

>>> from scapy.all import IP, UDP
>>> from scapy_layer import Tailbound, bind
>>> bind(45900)
>>> IP(dst="198.18.0.2") / UDP() / Tailbound(type="BYE", cookie=7, sender=1)  # doctest: +SKIP

``check`` is filled in when it is left out; with ``Tailbound.keys`` it is the tag by the key that
flag EPOCH names. Payloads are taken as they are: pad them to a multiple of 16 bytes, or do not, where a bad length is
wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scapy import fields
from scapy.layers.inet import UDP
from scapy.packet import Packet, bind_bottom_up, bind_layers, split_bottom_up, split_layers

from tailbound.wire.proof import proof_of
from tailbound.wire.schema import HEADER, HEADER_BYTES, KEY_WORDS, ROW_STEP, VERSION, Field, Flag, PacketType
from tailbound.wire.tag import NO_KEY

_KINDS: dict[str, type[Any]] = {
    "u8": fields.ByteField,
    "u16": fields.ShortField,
    "u32": fields.IntField,
    "u64": fields.LongField,
    "s16": fields.SignedShortField,
    "s32": fields.SignedIntField,
    "f32": fields.IEEEFloatField,
}


def _field(field: Field) -> Any:
    """The scapy field for a field of the header."""
    if field.name == "type":
        return fields.ByteEnumField("type", int(PacketType.CONTRIBUTION), {int(t): t.name for t in PacketType})
    if field.name == "flags":
        names = {int(flag).bit_length() - 1: str(flag.name) for flag in Flag}
        return fields.FlagsField("flags", 0, 16, [names.get(bit, f"bit{bit}") for bit in range(16)])
    if field.name == "check":
        return fields.XLongField("check", None)  # type: ignore[arg-type]
    return _KINDS[field.kind](field.name, VERSION if field.name == "version" else 0)


class Tailbound(Packet):
    """A Tailbound packet after UDP: the fields of ``schema.HEADER`` in their order, then codes or a control body."""

    name = "Tailbound"
    #: of the even and the odd epoch (``wire.tag``): what is built has tags; none: checks
    keys: ClassVar[Sequence[NDArray[np.uint64]]] = ()
    fields_desc = [_field(f) for f in HEADER.fields]  # noqa: RUF012  scapy's own convention

    def post_build(self, pkt: bytes, pay: bytes) -> bytes:
        """Fills in the check or the tag, unless one was given; a payload of odd length counts as padded with zeros."""
        if self.check is None:
            padded = np.frombuffer(bytearray(pkt + pay + bytes(-len(pay) % ROW_STEP)), np.uint8)
            key = self.keys[bool(int.from_bytes(pkt[2:4], "big") & Flag.EPOCH)] if self.keys else NO_KEY
            most = 8 * (len(key) - KEY_WORDS)
            if self.keys and len(padded) - HEADER_BYTES > most:
                raise ValueError(f"a payload of {len(pay)} bytes does not fit the key: give {most} at most")
            pkt = pkt[: HEADER_BYTES - 8] + int(proof_of(padded, key)).to_bytes(8, "big")
        return pkt + pay


def bind(port: int) -> None:
    """Takes UDP packets from or to ``port`` as Tailbound's; a packet that is built goes to ``port``."""
    bind_layers(UDP, Tailbound, dport=port)
    bind_bottom_up(UDP, Tailbound, sport=port)


def unbind(port: int) -> None:
    """Undoes ``bind``."""
    split_layers(UDP, Tailbound, dport=port)
    split_bottom_up(UDP, Tailbound, sport=port)

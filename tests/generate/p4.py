"""Text of ``p4/wire.p4``: the schema's header, numbers and verdicts for the P4 switch."""

from __future__ import annotations

import enum

from tailbound.wire import check, schema
from tailbound.wire.packets import KINDS, dtype_of

_LICENSE = "// SPDX-License-Identifier: Apache-2.0\n"
_NOTE = "/* Generated from host_lib/tailbound/wire/schema.py: change that, then run `make generate`. */\n"
#: Words of P4 that a field of the schema has for a name.
_KEYWORDS = {"type", "state", "key", "default", "error"}


def field_name(name: str) -> str:
    """The P4 name of a header field: its own, with an underscore behind it where that is a word of the language."""
    return f"{name}_" if name in _KEYWORDS else name


def _type(kind: str) -> str:
    return f"int<{8 * KINDS[kind][0]}>" if kind.startswith("s") else f"bit<{8 * KINDS[kind][0]}>"


def _enum(prefix: str, width: int, kind: type[enum.IntEnum] | type[enum.IntFlag]) -> str:
    return "".join(f"const bit<{width}> {prefix}_{m.name} = {int(m)};\n" for m in kind)


def _as_bits() -> str:
    """A function that gives the header as one number, first field uppermost, the check taken as zero."""
    parts = []
    for f in schema.HEADER.fields:
        width = 8 * KINDS[f.kind][0]
        if f.name == "check":
            parts.append(f"{width}w0")
        elif f.kind.startswith("s"):
            parts.append(f"(bit<{width}>)h.{field_name(f.name)}")
        else:
            parts.append(f"h.{field_name(f.name)}")
    lines = " ++\n           ".join(parts)
    return (
        "/* The header as one number, its check taken as zero. */\n"
        f"bit<{8 * schema.HEADER_BYTES}> tb_header_bits(in tb_header_t h) {{\n    return {lines};\n}}\n"
    )


def wire_p4() -> str:
    """Text of ``p4/wire.p4``: what goes over the network, and the verdicts of the ledger."""
    dtype_of(schema.HEADER)  # refuses holes
    numbers = {
        "bit<8> TB_VERSION": schema.VERSION,
        "bit<16> TB_HEADER_BYTES": schema.HEADER_BYTES,
        "bit<16> TB_ROW_STEP": schema.ROW_STEP,
        "int<16> TB_EXPONENT_NONE": schema.EXPONENT_NONE,
    }
    body = "".join(f"const {k} = {v};\n" for k, v in numbers.items())
    body += "".join(f"const bit<64> TB_CHECK_{k} = {getattr(check, k):#x};\n" for k in ("K1", "K2", "K3", "K4"))
    body += "\n" + _enum("TB_TYPE", 8, schema.PacketType)
    body += f"const bit<8> TB_TYPE_LAST = {max(schema.PacketType)};\n\n" + _enum("TB_FLAG", 16, schema.Flag)
    body += "\n" + _enum("TB_VERDICT", 8, schema.Verdict)
    body += f"\n/* {schema.HEADER.doc} */\nheader {schema.HEADER.name}_t {{\n"
    body += "".join(f"    {_type(f.kind)} {field_name(f.name)}; // {f.doc}\n" for f in schema.HEADER.fields)
    body += "}\n\n" + _as_bits()
    return f"{_LICENSE}{_NOTE}#ifndef TB_WIRE_P4\n#define TB_WIRE_P4\n\n{body}\n#endif\n"

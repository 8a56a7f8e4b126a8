"""The schema for C and P4: text of ``ebpf/wire.h``, ``ebpf/abi.h``, ``host_lib/core/records.h`` and ``p4/wire.p4``."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from tailbound.wire import check, schema
from tailbound.wire.packets import KINDS, dtype_of

_NOTE = "/* Generated from host_lib/tailbound/wire/schema.py: change that, then run `make generate`. */\n"
_C = {"u8": "__u8", "u16": "__u16", "u32": "__u32", "u64": "__u64", "s16": "__s16", "s32": "__s32", "f32": "__u32"}
_C |= {"s64": "__s64", "f64": "double"}
_WIRE = _C | {"u16": "__be16", "u32": "__be32", "u64": "__be64", "s16": "__be16", "f32": "__be32"}
#: Words of P4 that a field of the schema has for a name.
_P4_KEYWORDS = {"type", "state", "key", "default", "error"}
Enum = type[enum.IntEnum] | type[enum.IntFlag]


def _named(*names: str) -> dict[str, int]:
    """Numbers of the schema by their names in C."""
    return {f"TB_{name}": int(getattr(schema, name)) for name in names}


def _members(prefix: str, kind: Enum) -> dict[str, int]:
    return {f"TB_{prefix}_{member.name}": int(member) for member in kind}


def _check(ending: str = "") -> dict[str, str]:
    return {f"TB_CHECK_{k}": f"{getattr(check, k):#x}{ending}" for k in ("K1", "K2", "K3", "K4")}


# -- C -----------------------------------------------------------------------------------------------------------------


def _defines(numbers: Mapping[str, int | str]) -> str:
    shown = {name: f"({n})" if isinstance(n, int) and n < 0 else n for name, n in numbers.items()}
    return "".join(f"#define {name} {value}\n" for name, value in shown.items())


def _struct(struct: schema.Struct, kinds: dict[str, str]) -> str:
    dtype_of(struct)  # refuses holes
    lines = [f"/* {struct.doc} */", f"struct {struct.name} {{"]
    for f in struct.fields:
        kind = "struct bpf_spin_lock" if f.kind == "lock" else kinds[f.kind]
        array = f"[{f.count}]" if f.count > 1 else ""
        lines.append(f"\t{kind} {f.name}{array}; /* {f.doc} */")
    size = sum(KINDS[f.kind][0] * f.count for f in struct.fields)
    lines += ["};", f'_Static_assert(sizeof(struct {struct.name}) == {size}, "{struct.name}");', ""]
    return "\n".join(lines) + "\n"


def _guarded(name: str, *parts: str) -> str:
    licence = "/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */\n"
    return f"{licence}{_NOTE}#ifndef {name}\n#define {name}\n\n{''.join(parts)}#endif /* {name} */\n"


def wire_header() -> str:
    """Text of ``ebpf/wire.h``: what goes over the network."""
    numbers = _named(
        "VERSION", "HEADER_BYTES", "MAX_RANKS", "WIDTH_STEP", "ROW_STEP", "OP_INDEX_BITS", "EXPONENT_NONE",
        "TIME_UNIT_US", "KEY_WORDS",
    )  # fmt: skip
    types = _members("TYPE", schema.PacketType) | {"TB_TYPE_LAST": max(schema.PacketType)}
    tables = (_defines(table) + "\n" for table in (numbers | _check("ULL"), types, _members("FLAG", schema.Flag)))
    return _guarded("TB_WIRE_H", *tables, _struct(schema.HEADER, _WIRE))


def abi_header() -> str:
    """Text of ``ebpf/abi.h``: values of the maps, ledger columns and events."""
    numbers = _named(
        "UNKNOWN_SENDER", "OP_STEPS", "OP_PER_STEP", "OP_RING", "CONTEXTS", "ACTIVE_WITH_SOCKET", "SWITCH_JOBS",
        "VERDICTS", "FIRST_DROP",
    )  # fmt: skip
    every = " ".join(f"MAP({m.name})" for m in schema.WORKER_MAPS)
    tables = (numbers, _members("VERDICT", schema.Verdict), _members("EVENT", schema.Event))
    maps = f"/* Every map of a worker by name. */\n#define TB_WORKER_MAPS(MAP) {every}\n\n"
    structs = (_struct(s, _C) for s in schema.STRUCTS)
    return _guarded("TB_ABI_H", *(_defines(table) + "\n" for table in tables), maps, *structs)


def records_header() -> str:
    """Text of ``host_lib/core/records.h``: what the library and Python tell each other."""
    enums = {"SEND": schema.Sent, "SENDING": schema.Sending, "PHASE": schema.Phase, "WHY": schema.Why}
    enums |= {"FOUND": schema.Found, "READY": schema.Ready, "WOKEN": schema.Woken, "ACTION": schema.Action}
    tables = (
        _named("SHARED_MOST", "CHANNELS_MOST", "KEPT_ANSWERS", "OPENED_MOST", "REFUSED_MOST"),
        _named("POKED", "SAID_MOST", "SERVE_AFTER", "SOCKETS_AT"),
        *(_members(name, kind) for name, kind in enums.items()),
    )
    structs = (_struct(s, _C) for s in schema.RECORDS)
    return _guarded("TB_RECORDS_H", "#include <linux/types.h>\n\n", *(_defines(t) + "\n" for t in tables), *structs)


# -- P4 ----------------------------------------------------------------------------------------------------------------


def _consts(kind: str, numbers: Mapping[str, int | str]) -> str:
    return "".join(f"const {kind} {name} = {value};\n" for name, value in numbers.items())


def wire_p4() -> str:
    """Text of ``p4/wire.p4``: what goes over the network, and the verdicts of the ledger."""
    dtype_of(schema.HEADER)  # refuses holes
    header, bits = "", []
    for f in schema.HEADER.fields:
        width, signed = 8 * KINDS[f.kind][0], f.kind.startswith("s")
        name = f"{f.name}_" if f.name in _P4_KEYWORDS else f.name
        header += f"    {'int' if signed else 'bit'}<{width}> {name}; // {f.doc}\n"
        value = f"(bit<{width}>)h.{name}" if signed else f"h.{name}"
        bits.append(f"{width}w0" if f.name == "check" else value)
    parts = (
        _consts("bit<8>", _named("VERSION")), _consts("bit<16>", _named("HEADER_BYTES", "ROW_STEP")),
        _consts("int<16>", _named("EXPONENT_NONE")), _consts("bit<64>", _check()),
        "\n", _consts("bit<8>", _members("TYPE", schema.PacketType) | {"TB_TYPE_LAST": max(schema.PacketType)}),
        "\n", _consts("bit<16>", _members("FLAG", schema.Flag)),
        "\n", _consts("bit<8>", _members("VERDICT", schema.Verdict)),
        f"\n/* {schema.HEADER.doc} */\nheader {schema.HEADER.name}_t {{\n{header}}}\n\n",
        "/* The header as one number, its check taken as zero. */\n",
        f"bit<{8 * schema.HEADER_BYTES}> tb_header_bits(in tb_header_t h) {{\n    return ",
        " ++\n           ".join(bits), ";\n}\n",
    )  # fmt: skip
    guard = "#ifndef TB_WIRE_P4\n#define TB_WIRE_P4\n\n"
    return f"// SPDX-License-Identifier: Apache-2.0\n{_NOTE}{guard}{''.join(parts)}\n#endif\n"

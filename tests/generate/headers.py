"""Text of ``ebpf/wire.h``, ``ebpf/abi.h`` and ``host_lib/core/records.h``: the schema for C."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from tailbound.wire import check, schema
from tailbound.wire.packets import KINDS, dtype_of

_LICENSE = "/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */\n"
_NOTE = "/* Generated from host_lib/tailbound/wire/schema.py: change that, then run `make generate`. */\n"
_C = {"u8": "__u8", "u16": "__u16", "u32": "__u32", "u64": "__u64", "s16": "__s16", "s32": "__s32", "f32": "__u32"}
_C |= {"s64": "__s64", "f64": "double"}
_WIRE = _C | {"u16": "__be16", "u32": "__be32", "u64": "__be64", "s16": "__be16", "f32": "__be32"}


def _defines(numbers: Mapping[str, int | str]) -> str:
    return "".join(f"#define {name} {value}\n" for name, value in numbers.items())


def _enum(prefix: str, kind: type[enum.IntEnum] | type[enum.IntFlag]) -> str:
    return _defines({f"{prefix}_{m.name}": int(m) for m in kind})


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


def _guarded(name: str, body: str) -> str:
    return f"{_LICENSE}{_NOTE}#ifndef {name}\n#define {name}\n\n{body}#endif /* {name} */\n"


def wire_header() -> str:
    """Text of ``ebpf/wire.h``: what goes over the network."""
    numbers = {
        "TB_VERSION": schema.VERSION,
        "TB_HEADER_BYTES": schema.HEADER_BYTES,
        "TB_MAX_RANKS": schema.MAX_RANKS,
        "TB_WIDTH_STEP": schema.WIDTH_STEP,
        "TB_ROW_STEP": schema.ROW_STEP,
        "TB_OP_INDEX_BITS": schema.OP_INDEX_BITS,
        "TB_EXPONENT_NONE": f"({schema.EXPONENT_NONE})",
        "TB_TIME_UNIT_US": schema.TIME_UNIT_US,
        "TB_KEY_WORDS": schema.KEY_WORDS,
    }
    numbers |= {f"TB_CHECK_{k}": f"{getattr(check, k):#x}ULL" for k in ("K1", "K2", "K3", "K4")}
    body = _defines(numbers)
    body += "\n" + _enum("TB_TYPE", schema.PacketType) + f"#define TB_TYPE_LAST {max(schema.PacketType)}\n\n"
    body += _enum("TB_FLAG", schema.Flag)
    body += "\n" + _struct(schema.HEADER, _WIRE)
    return _guarded("TB_WIRE_H", body)


def abi_header() -> str:
    """Text of ``ebpf/abi.h``: values of the maps, ledger columns and events."""
    numbers = {
        "TB_UNKNOWN_SENDER": schema.UNKNOWN_SENDER,
        "TB_OP_STEPS": schema.OP_STEPS,
        "TB_OP_PER_STEP": schema.OP_PER_STEP,
        "TB_OP_RING": schema.OP_RING,
        "TB_CONTEXTS": schema.CONTEXTS,
        "TB_ACTIVE_WITH_SOCKET": schema.ACTIVE_WITH_SOCKET,
        "TB_SWITCH_JOBS": schema.SWITCH_JOBS,
        "TB_VERDICTS": schema.VERDICTS,
        "TB_FIRST_DROP": int(schema.FIRST_DROP),
    }
    body = _defines(numbers)
    body += "\n" + _enum("TB_VERDICT", schema.Verdict) + "\n" + _enum("TB_EVENT", schema.Event) + "\n"
    body += "/* Every map of a worker by name. */\n"
    body += f"#define TB_WORKER_MAPS(MAP) {' '.join(f'MAP({m.name})' for m in schema.WORKER_MAPS)}\n\n"
    body += "".join(_struct(s, _C) for s in schema.STRUCTS)
    return _guarded("TB_ABI_H", body)


def records_header() -> str:
    """Text of ``host_lib/core/records.h``: what the library and Python tell each other."""
    numbers = {"TB_DESTINATIONS": schema.DESTINATIONS, "TB_CHANNELS_MOST": schema.CHANNELS_MOST}
    enums = {"SEND": schema.Sent, "SENDING": schema.Sending, "PHASE": schema.Phase, "WHY": schema.Why}
    enums["FOUND"] = schema.Found
    body = f"#include <linux/types.h>\n\n{_defines(numbers)}\n"
    body += "".join(_enum(f"TB_{name}", kind) + "\n" for name, kind in enums.items())
    body += "".join(_struct(s, _C) for s in schema.RECORDS)
    return _guarded("TB_RECORDS_H", body)

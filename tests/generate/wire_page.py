"""``docs/wire.md``: all that is needed to read and write the packets in another language."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from tailbound.wire import check, schema
from tailbound.wire.packets import KINDS

_NUMBERS = (
    ("VERSION", schema.VERSION, "the header's first byte; packets of another version are dropped as BAD_VERSION"),
    ("DEFAULT_PORT", schema.DEFAULT_PORT, "UDP port of a job on an interface with an attached program"),
    ("EXPONENT_NONE", schema.EXPONENT_NONE, "`need` or `exponent` of a group in which all is zero"),
    ("MAX_RANKS", schema.MAX_RANKS, "ranks of a job at most"),
    ("OP_INDEX_BITS", schema.OP_INDEX_BITS, "low bits of an op label that hold the index of the op within its step"),
    ("ROW_STEP", schema.ROW_STEP, "a payload's length is a multiple of so many bytes"),
)
_CODES = (
    ("of 8 bits", "V: code w in byte w", "(code - 128) x scale / 127"),
    ("of 16 bits", "2 V: the V upper bytes, then the V lower ones", "(code - 32768) x scale / 32767"),
    (
        "of 4 bits (flag HALVES)",
        "V / 2: of every sixteen codes the first eight in the low halves of eight bytes, the others in the high ones",
        "(code - 8) x scale / 7",
    ),
    (
        "sums of 8-bit codes (flag SUMS)",
        "2 V: sum w in bytes 2 w and 2 w + 1, big endian",
        "(sum / `count` - 128) x scale / 127",
    ),
)
_PAYLOAD = """\
A payload holds the V entries of one row, as codes. An entry is a value of the rotated row, divided by the square root
of the number of rows that are rotated together. An exponent e stands for the scale 2^(e/4). In the table, `scale` is
that of the header in results. In contributions it is that of the exponent, times `weight`.
"""
_ORDER = """\
Code 0 is never sent. Rows of an op have V codes each, those of one type payloads of the same length. They may be
shorter than the width that the programs are compiled for; nothing is padded. Contributions of 4 bits have the flag
HALVES; V is twice the bytes of such a payload, and at most the width. The sums that an owner's kernel keeps in memory
have another order: of every eight codes first those with an even index, then those with an odd one (`ebpf/lanes.h`).

A result of 8 bits whose scale is negative has rounding offsets left in it. Then the absolute value is its scale,
and code - u + 1/2 stands where the table says code, with the offset u of the entry (codec-7 in `docs/rules.md`).
"""
_CHECK = f"""\
`check` covers the payload and the header, in this order, with the field `check` itself taken as zero. They are read as
64-bit little-endian words w[0], w[1], ... All sums are taken modulo 2^64.

    a[0], a[1], b[0], b[1] = 0
    for each word w[i]:
        a[i mod 2] += w[i]
        b[i mod 2] += a[i mod 2]
    c = a[0] * K1 + a[1] * K2 + b[0] * K3 + b[1] * K4
    check = c xor (c >> 32)                                  stored in network byte order like every field

    K1 = 0x{check.K1:016X}    K2 = 0x{check.K2:016X}
    K3 = 0x{check.K3:016X}    K4 = 0x{check.K4:016X}

It finds damage and does not protect against forgery. `check_reference` in `wire/check.py` is its definition in plain
Python.
"""
_TAG = f"""\
In a job with a key ([security](security.md)) a tag stands in the place of the check. A key is that of an epoch; flag
EPOCH is set in odd ones. It has two words of SipHash's, s[0] and s[1], and one for each word of header and payload,
k[i].

    w = the header's words 0 to 6, the payload's length in bytes, the payload's words
    h = 0
    for each word w[i]:
        x = w[i] + k[i]                                      modulo 2^64
        h += x * (x >> 32)                                   modulo 2^64
    check = SipHash-2-4 by s[0], s[1] of 16 bytes: op * 2^32 + seq, then h, each as a little-endian word

A control packet has a stamp in bytes 32 to 39, which rises with each that its sender makes. `tag_reference` in
`wire/tag.py` is the definition in plain Python. A key there has {schema.KEY_WORDS} words before those of a row: between
SipHash's and the header's stands one with the flag.
"""


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _header() -> Iterable[tuple[object, ...]]:
    offset = 0
    for f in schema.HEADER.fields:
        size = KINDS[f.kind][0] * f.count
        yield offset, size, f"`{f.name}`", f.kind, f.doc
        offset += size


def _numbered(kind: type[enum.IntEnum] | type[enum.IntFlag]) -> str:
    return _table(("number", "name"), ((int(m), m.name) for m in kind))


def _verdicts() -> str:
    fates = _table(("fate", "meaning", "advice"), ((f"`{f}`", f.meaning, f.advice) for f in schema.Fate))
    own = {v: v.advice if v.advice != v.fate.advice else "" for v in schema.Verdict}  # else as the fate's
    verdicts = ((int(v), v.name, f"`{v.fate}`", v.meaning, own[v]) for v in schema.Verdict)
    return (
        "The ledger counts every packet under one verdict, by sender. A verdict tells the fate of its row. Where its "
        "advice is empty, that of its fate holds.\n\n"
        f"{fates}\nRows that a peer should have brought = `taken` + {' + '.join(f'`{f}`' for f in schema.MISSING)}.\n\n"
        + _table(("number", "name", "fate", "meaning", "advice"), verdicts)
    )


def wire_page() -> str:
    """Text of ``docs/wire.md``."""
    sections = {
        "Header (64 bytes, network byte order)": _table(("offset", "bytes", "field", "kind", "meaning"), _header()),
        "Numbers": _table(("name", "value", "meaning"), _NUMBERS),
        "Payload": f"{_PAYLOAD}\n{_table(('codes', 'bytes', 'entry'), _CODES)}\n{_ORDER}",
        "Check": _CHECK,
        "Tag": _TAG,
        "Packet types": _numbered(schema.PacketType),
        "Flags": _numbered(schema.Flag),
        "Verdicts": _verdicts(),
    }
    head = "# Wire format and ledger\n\nGenerated from `host_lib/tailbound/wire/schema.py` by `make generate`.\n"
    return head + "".join(f"\n## {title}\n\n{text}" for title, text in sections.items())

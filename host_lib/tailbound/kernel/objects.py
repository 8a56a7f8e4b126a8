"""Compiled programs as plain instruction bytes, in which maps are still numbers: 1 for the first of a list, and so on.

BCC is made to emit that form directly (``TB_FD_name``), clang's object files are brought into it, and ``link`` puts
the descriptors of one process in. So an object can be kept in a cache and loaded by any number of workers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

_LD_IMM64, _PSEUDO_MAP_FD = 0x18, 1
_SHT_SYMTAB, _SHT_REL = 2, 9
_PREFIX = "tb_map_"


def placeholders(maps: Sequence[str]) -> dict[str, int]:
    """The number that stands for each map."""
    return {name: i + 1 for i, name in enumerate(maps)}


def link(code: bytes, maps: Sequence[str], fds: Mapping[str, int]) -> bytes:
    """``code`` with the numbers of maps replaced by descriptors.

    Raises:
        ValueError: the code names a map that is not in the list.
    """
    out = bytearray(code)
    offset = 0
    while offset < len(out):
        opcode, registers, _, number = struct.unpack_from("=BBhi", out, offset)
        if opcode == _LD_IMM64:
            if registers >> 4 == _PSEUDO_MAP_FD:
                if not 1 <= number <= len(maps):
                    raise ValueError(f"instruction {offset // 8} names map {number} of {len(maps)}")
                struct.pack_into("=i", out, offset + 4, fds[maps[number - 1]])
            offset += 8
        offset += 8
    return bytes(out)


def read_elf(data: bytes, section: str, maps: Sequence[str]) -> bytes:
    """Instructions of ``section`` of a 64-bit BPF object file, references to ``tb_map_NAME`` turned into numbers.

    Raises:
        ValueError: not such a file, no such section, or a relocation that is no map.
    """
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    order = "<" if data[5] == 1 else ">"
    table = struct.unpack_from(order + "Q", data, 0x28)[0]
    size, count, names_index = struct.unpack_from(order + "HHH", data, 0x3A)
    # name, type, flags, address, offset, size, link, info, align, entry size
    sections = [struct.unpack_from(order + "IIQQQQIIQQ", data, table + i * size) for i in range(count)]

    def text(strings: int, offset: int) -> str:
        start = sections[strings][4] + offset
        return data[start : data.index(b"\0", start)].decode()

    wanted = [i for i, s in enumerate(sections) if text(names_index, s[0]) == section]
    if not wanted:
        raise ValueError(f"no section {section!r}")
    index = wanted[0]
    code = bytearray(data[sections[index][4] : sections[index][4] + sections[index][5]])
    numbers = placeholders(maps)
    for s in sections:
        if s[1] != _SHT_REL or s[7] != index:
            continue
        symbols = sections[s[6]]
        if symbols[1] != _SHT_SYMTAB:
            raise ValueError("relocations without a symbol table")
        for at in range(s[4], s[4] + s[5], 16):
            offset, info = struct.unpack_from(order + "QQ", data, at)
            name = text(symbols[6], struct.unpack_from(order + "I", data, symbols[4] + (info >> 32) * 24)[0])
            if not name.startswith(_PREFIX) or name[len(_PREFIX) :] not in numbers or code[offset] != _LD_IMM64:
                raise ValueError(f"relocation against {name!r}, which is no map of this program")
            code[offset + 1] = code[offset + 1] & 0x0F | _PSEUDO_MAP_FD << 4
            struct.pack_into(order + "i", code, offset + 4, numbers[name[len(_PREFIX) :]])
    return bytes(code)

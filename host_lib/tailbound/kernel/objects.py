"""Compiled programs as plain instruction bytes, in which maps are still numbers: 1 for the first of a list, and so on.

BCC is made to emit that form directly (``TB_FD_name``), clang's object files are brought into it, and ``link`` puts
the descriptors of one process in. So an object can be kept in a cache and loaded by any number of workers.

In clang's objects some constants are open, too (``NUMBERS``): ``link`` puts them in as it does descriptors, and the
verifier sees what it would have seen of a macro. BCC's instructions have them inside.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

#: Constants of the sources that are put in when a program is loaded (``xdp_programs/maps.h``).
NUMBERS = ("TB_PORT", "TB_PORTS", "TB_RESULT_ROWS", "TB_SUM_ROWS", "TB_VLAN")
_LD_IMM64, _PSEUDO_MAP_FD = 0x18, 1
_NUMBER = 15  #: marks a constant, where the kernel's own marks of ld_imm64 stand; never seen by the kernel
_SHT_SYMTAB, _SHT_REL = 2, 9
_MAP, _CONSTANT = "tb_map_", "tb_number_"


def placeholders(maps: Sequence[str]) -> dict[str, int]:
    """The number that stands for each map."""
    return {name: i + 1 for i, name in enumerate(maps)}


def link(code: bytes, maps: Sequence[str], fds: Mapping[str, int], numbers: Mapping[str, int] | None = None) -> bytes:
    """``code`` with the numbers of maps replaced by descriptors, and with the constants that it leaves open.

    Args:
        code: what ``read_elf`` or BCC gave.
        maps: names of maps, in the order of their numbers.
        fds: descriptors by name.
        numbers: constants by name, u32; those that the code does not ask for are left alone.

    Raises:
        ValueError: the code names a map that is not in the list, or a constant that is not given.
    """
    out, given = bytearray(code), numbers or {}
    offset = 0
    while offset < len(out):
        opcode, registers, _, number = struct.unpack_from("=BBhi", out, offset)
        if opcode == _LD_IMM64:
            if registers >> 4 == _PSEUDO_MAP_FD:
                if not 1 <= number <= len(maps):
                    raise ValueError(f"instruction {offset // 8} names map {number} of {len(maps)}")
                struct.pack_into("=i", out, offset + 4, fds[maps[number - 1]])
            elif registers >> 4 == _NUMBER:
                name = NUMBERS[number - 1]
                if name not in given:
                    raise ValueError(f"instruction {offset // 8} asks for {name}, which is not given")
                out[offset + 1] = registers & 0x0F
                struct.pack_into("=I", out, offset + 4, given[name])
            offset += 8
        offset += 8
    return bytes(out)


def read_elf(data: bytes, section: str, maps: Sequence[str]) -> bytes:
    """Instructions of ``section`` of a 64-bit BPF object; ``tb_map_NAME`` and ``tb_number_NAME`` are numbers in them.

    Raises:
        ValueError: not such a file, no such section, or a relocation that is neither map nor constant.
    """
    sections, order = _sections(data)
    index = _index(sections, section)
    code = bytearray(_content(data, sections[index]))
    marks = {_MAP + name: (_PSEUDO_MAP_FD, number) for name, number in placeholders(maps).items()}
    marks |= {_CONSTANT + name: (_NUMBER, place + 1) for place, name in enumerate(NUMBERS)}
    for s in sections:
        if s.kind != _SHT_REL or s.info != index:
            continue
        symbols = sections[s.link]
        if symbols.kind != _SHT_SYMTAB:
            raise ValueError("relocations without a symbol table")
        for at in range(s.offset, s.offset + s.size, 16):
            offset, info = struct.unpack_from(order + "QQ", data, at)
            name_at = struct.unpack_from(order + "I", data, symbols.offset + (info >> 32) * 24)[0]
            name = _text(data, sections[symbols.link], name_at)
            if name not in marks or code[offset] != _LD_IMM64:
                raise ValueError(f"relocation against {name!r}, which is no map of this program and no constant")
            mark, number = marks[name]
            code[offset + 1] = code[offset + 1] & 0x0F | mark << 4
            struct.pack_into(order + "i", code, offset + 4, number)
    return bytes(code)


def section_text(data: bytes, section: str) -> str:
    """The text up to the first zero byte of ``section``.

    Raises:
        ValueError: not a 64-bit ELF file, no such section, or no text in it.
    """
    sections, _ = _sections(data)
    return _content(data, sections[_index(sections, section)]).partition(b"\0")[0].decode()


class _Section(NamedTuple):
    """A section header of ELF64; ``name`` is what its name's place was, resolved."""

    name: str
    kind: int
    offset: int
    size: int
    link: int
    info: int


def _sections(data: bytes) -> tuple[list[_Section], str]:
    """All section headers, and the byte order as struct writes it."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    order = "<" if data[5] == 1 else ">"
    try:
        table = struct.unpack_from(order + "Q", data, 0x28)[0]
        size, count, names = struct.unpack_from(order + "HHH", data, 0x3A)
        # name, type, flags, address, offset, size, link, info, align, entry size
        raw = [struct.unpack_from(order + "IIQQQQIIQQ", data, table + i * size) for i in range(count)]
        if names >= count:
            raise ValueError("names of sections are missing")
        strings = _Section("", raw[names][1], raw[names][4], raw[names][5], 0, 0)
        return [_Section(_text(data, strings, s[0]), s[1], s[4], s[5], s[6], s[7]) for s in raw], order
    except struct.error as error:
        raise ValueError(f"a torn ELF file: {error}") from error


def _content(data: bytes, section: _Section) -> bytes:
    return data[section.offset : section.offset + section.size]


def _text(data: bytes, strings: _Section, offset: int) -> str:
    start = strings.offset + offset
    return data[start : data.index(b"\0", start)].decode()


def _index(sections: Sequence[_Section], name: str) -> int:
    for index, section in enumerate(sections):
        if section.name == name:
            return index
    raise ValueError(f"no section {name!r}")

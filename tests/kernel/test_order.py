"""Words that are read without a lock are published in order: seen in the instructions, since only arm64 would show it.

A walk over all paths of the compiled program with what a run knows of locks: whether one is held.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from kernel_world import DEFINES
from loaders import both_loaders
from tailbound.kernel import load
from tailbound.kernel.compile import compile_program

_CALL, _EXIT, _LOAD_64, _ATOMIC_64, _EXCHANGE = 0x85, 0x95, 0x18, 0xDB, 0xE1
_LOCK, _UNLOCK = 93, 94
_AND_NUMBER, _ADD_REGISTER, _LOAD_WORD, _MOVE = 0x57, 0x0F, 0x79, 0xBF
_JUMP, _JUMP_32, _ALWAYS = 5, 6, 0x05


def instructions(loader: str) -> list[tuple[int, int, int, int]]:
    """(opcode, registers, offset, immediate) of the worker's instructions."""
    code = compile_program("worker.bpf.c", load.WORKER, DEFINES, load.WORKER_MAP_NAMES, loader, "xdp")
    return list(struct.iter_unpack("=BBhi", code))


def worker(loader: str) -> list[tuple[int, int, int]]:
    """The same without registers."""
    return [(op, off, imm) for op, _, off, imm in instructions(loader)]


def walk(code: list[tuple[int, int, int]]) -> dict[int, set[bool]]:
    """Exchanges, and whether a lock was held there: on every path from the beginning."""
    found: dict[int, set[bool]] = {}
    seen: set[tuple[int, bool]] = set()
    todo = [(0, False)]
    while todo:
        at, held = todo.pop()
        if (at, held) in seen:
            continue
        seen.add((at, held))
        op, _, imm = code[at]
        assert op != _EXIT or not held
        if op == _ATOMIC_64 and imm == _EXCHANGE:
            found.setdefault(at, set()).add(held)
        if op == _CALL and imm in (_LOCK, _UNLOCK):
            assert held == (imm == _UNLOCK)
            held = imm == _LOCK
        todo += [(to, held) for to in following(code, at)]
    return found


@both_loaders
def test_published_under_a_lock(loader: str) -> None:
    """Tags of op records (opened in two places) and presence of results; the latter under the row's lock.

    Rules: kernel-17, kernel-20.
    """
    found = walk(worker(loader))
    assert len(found) >= 3
    assert all(held == {True} for held in found.values())


def following(code: list[tuple[int, int, int]], at: int) -> Iterator[int]:
    """Where it may go on after ``at``."""
    op, off, _ = code[at]
    if op == _EXIT:
        return
    if op & 7 in (_JUMP, _JUMP_32) and op != _CALL:
        yield at + 1 + off
        if op == _ALWAYS:
            return
    yield at + (2 if op == _LOAD_64 else 1)


def held_after(code: list[tuple[int, int, int]], lock: int) -> set[int]:
    """Instructions between a lock that is taken and the places where it is given back."""
    found: set[int] = set()
    todo = [lock + 1]
    while todo:
        at = todo.pop()
        if at in found or (code[at][0] == _CALL and code[at][2] == _UNLOCK):
            continue
        found.add(at)
        todo += following(code, at)
    return found


@both_loaders
def test_presence_belongs_to_the_row(loader: str) -> None:
    """Between a row's lock and its release its presence is written: nobody finds one without the other."""
    code, rows = worker(loader), 0
    for lock, (op, _, imm) in enumerate(code):
        if op != _CALL or imm != _LOCK:
            continue
        held = held_after(code, lock)
        loop = any(code[at][0] != _ALWAYS and to <= at and to in held for at in held for to in following(code, at))
        rows += loop and any(code[at][0] == _ATOMIC_64 and code[at][2] == _EXCHANGE for at in held)
    assert rows == 1


@both_loaders
def test_records_are_read_by_their_tag(loader: str) -> None:
    """Where a record's tag is read without its lock, a zero that depends on it is part of the record's address.

    So no processor reads the rest of the record before the tag. No compiler makes a zero in this way by itself. Packets
    with news and those that come too late look at a record: two places.
    """
    code, found = instructions(loader), 0
    for at, (op, registers, _, number) in enumerate(code):
        if op != _AND_NUMBER or number:
            continue
        zero = registers & 15
        source = code[at - 1][1] >> 4 if code[at - 1][0] == _MOVE and code[at - 1][1] & 15 == zero else zero
        made = next(i for i in reversed(code[:at]) if i[1] & 15 == source and i[0] in (_LOAD_WORD, _MOVE))
        added = any(i[0] == _ADD_REGISTER and i[1] >> 4 == zero for i in code[at + 1 : at + 4])
        found += made[0] == _LOAD_WORD and made[2] == 0 and added  # the first word of the record
    assert found >= 2

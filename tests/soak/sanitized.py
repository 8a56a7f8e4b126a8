"""Part: the C library under AddressSanitizer and UndefinedBehaviorSanitizer, beside the model in plain Python.

Each seed is a process of its own: a wrong access ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np

import op_world
from answer_world import TAG, Answers
from hostile import damaged, hostile, plain
from kernel_world import HEADERS
from op_world import COOKIE, OpWorld, launched
from queue_world import ADDRESS, Line, Told
from reference_worker import ReferenceTables
from soak.part import Tell
from tailbound.codec.owners import OwnerMap
from tailbound.collective import op, speaker, terms
from tailbound.collective.op import Op
from tailbound.kernel import core
from tailbound.transport import control, queue
from tailbound.transport.config import MS, Switch
from tailbound.transport.control import Header
from tailbound.transport.pace import Pacer
from tailbound.transport.sender import Shared
from tailbound.transport.sequence import Sequence
from tailbound.transport.sockets import UdpSocket
from tailbound.wire.schema import HEADER_BYTES, KEY_WORDS, Found, PacketType, Phase
from tailbound.wire.tag import NO_KEY
from twins import Attack, Twins
from udp_world import Tables, World

#: Packets of one seed, of each sort.
COUNT = 2000
_OPTIONS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DTB_SANITIZED", "-O1", "-g")


@cache
def _runtime() -> str:
    """The sanitizer's library, which has to be there before Python's allocator; empty: none."""
    said = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return said if os.path.isabs(said) else ""


def lacking() -> str:
    """Why this part cannot run here, or nothing."""
    try:
        return "" if _runtime() else "gcc has no AddressSanitizer"
    except OSError:
        return "no gcc"


def build(folder: Path) -> Path:
    """The library with both sanitizers."""
    out = folder / "sanitized.so"
    subprocess.run(core.command("gcc", out, core.folders(), _OPTIONS), check=True)
    return out


def tried(library: Path, seed: int, count: int = COUNT) -> str:
    """One seed; what goes wrong, or nothing."""
    command = [sys.executable, "-m", "soak.sanitized", str(library), str(seed), str(count)]
    own = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = os.environ | own | {"LD_PRELOAD": _runtime()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.stderr[-8000:] if done.returncode else ""


@contextlib.contextmanager
def trials(number: int, tell: Tell, until: float) -> Iterator[Callable[[int], str]]:
    """A process a seed."""

    def trial(seed: int) -> str:
        tell("packets", 5 * COUNT)
        return tried(library, seed)

    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        yield trial


def _buffers(world: World, rng: random.Random, count: int) -> None:
    """Received buffers of packets that do not fit together, cut anywhere, in segments of any size."""
    for _ in range(count):
        data = b"".join(rng.choice((hostile, plain))(rng) for _ in range(rng.randrange(1, 5)))
        if rng.random() < 0.5:
            data = damaged(rng, [bytes(HEADERS) + data])[HEADERS:]
        segment = rng.choice((0, HEADER_BYTES, HEADER_BYTES + 128, rng.randrange(1, 2000)))
        world.feed(data[: rng.choice((len(data), rng.randrange(len(data) + 1)))], rng.randrange(1, 4), segment)
        if rng.random() < 0.01:
            world.tables.take_controls()
            world.tables.source.take()


def _headers(rng: random.Random, count: int) -> None:
    """Headers in packet memory that ends where they do."""
    for _ in range(count):
        rows, codes = rng.randrange(1, 20), 16 * rng.randrange(0, 20)
        memory, states = np.zeros((rows, HEADER_BYTES + codes), np.uint8), np.zeros((rows, 4), np.uint64)
        values, places = np.zeros(rows, np.int16), np.arange(rows, dtype=np.uint32)
        head, key = Header(type=rng.choice((1, 2))), rng.choice((NO_KEY, np.zeros(KEY_WORDS, np.uint64)))
        stamp = control.Stamp(memory, states, places, exponents=values, needs=values)
        stamp.write(head, [(0, rows, rows - 1, 0, 0, rows)], 1, key)
        at, proofs, tagged = (core.address(array) for array in (memory, states, key))
        control.core().fast.tb_add_flags(at, memory.shape[1], rows, proofs, 1, tagged)


def _answers(rng: random.Random, count: int) -> None:
    """Requests and words about rows with any body: of lists that are there, gone, or of another size."""
    with UdpSocket() as sock:
        op = (rank := Answers(sock)).enter()
        kinds, tags = (PacketType.REPAIR, PacketType.GONE), (TAG, op.place.tag)
        for label in range(10):
            rank.keep(label, rng.randrange(1, 1000), lacking=(0,))
        for now in range(count):
            head = Header(type=rng.choice(kinds), op=rng.choice((op.label, *range(12))), layout=rng.choice(tags))
            head.rows, head.flags, head.sender = rng.choice((64, rng.getrandbits(16))), rng.getrandbits(16), 1 + now % 3
            head.row = rng.randrange(head.rows + 1)
            rank.fast.tb_heed(ctypes.addressof(rank.voice), bytes(head) + rng.randbytes(99), 64 + rng.randrange(100))
            rank.line.kernel.script = [rng.choice((-1, -9, errno.EAGAIN, errno.EIO))]
            if rng.random() < 0.3:
                rank.answer(1000 * now)
        rank.fast.tb_leave(rank.terms.pointer, ctypes.addressof(op))


def _sends(rng: random.Random, count: int) -> None:
    """Submissions to ranks and to all at once, over sockets that are full, refuse, and take a part."""
    with UdpSocket() as one, UdpSocket() as other:
        channel = Shared("fanout", other, (ADDRESS, 7), (2, 3, 1))
        pacer = Pacer((1, 2, 3), gap=rng.choice((0, 1000)), most=rng.choice((0.0, 1e6)))
        told = Told()
        line = Line([one], pacer, channel, voice=told.voice, ways=rng.choice((1, 2)))
        for now in range(count):
            told.states["rtt_ns"], told.states["told"] = rng.randrange(2000), rng.getrandbits(32)
            told.published(now, rng.randrange(4))
            told.gone(*rng.sample((1, 2, 3), rng.randrange(4)))
            line.kernel.script = [rng.choice((-1, -9, errno.EAGAIN, errno.EPERM, errno.EIO)) for _ in range(3)]
            if rng.random() < 0.1:
                line.queue.pacer.hold_to(rng.randrange(1, 4), rng.choice((1e5, 1e9)))
            runs = [(to, rng.randrange(200)) for to in rng.sample((1, 2, 3, line.sender.ranks), rng.randrange(5))]
            kind = rng.choice((PacketType.CONTRIBUTION, PacketType.RESULT))
            line.submit(now, kind, *runs, now=1000 * now, until=1000 * now + 9999)
            if rng.random() < 0.1:
                line.queue.cancel(now)
        line.rest(1 << 50)


def _ops(rng: random.Random, count: int, *, switched: bool) -> None:
    """Ops of which records, marks, rows and answers say anything; a turn and a look at flows end."""
    ranks = rng.randrange(2, 6)
    world = OpWorld(ranks, 256, switch=Switch("10.0.0.9") if switched else None)
    sequence = Sequence(ranks + switched, OwnerMap(0, (ranks,) if switched else tuple(range(ranks))))
    ops: list[Op] = []
    for index in range(count // 20):
        if len(ops) < 4:
            ops.append(launched(sequence, ranks, index, 64 * rng.randrange(1, 60)))
            world.fast.tb_enter(world.terms.pointer, ctypes.addressof(ops[-1]))
        now, one = MS * index, rng.choice(ops)
        for name in ("contributed", "published"):
            world.marks(name, one.label, rng.sample(range(ranks), rng.randrange(ranks)))
        fields = {"layout": 7, "rows_complete": rng.randrange(40), "results_in": rng.randrange(80), "opened_ns": now}
        world.record(one.label, rng.choice((None, fields, fields)))
        one.sending, one.switched, one.own_in = rng.randrange(5), switched, rng.choice((0, now))
        one.stage_one, one.usual = rng.choice((0, MS, 50 * MS)), rng.choice((0, MS))
        one.known, one.cold = rng.random() < 0.5, rng.random() < 0.1
        world.store.peer_states["newest"], world.store.peer_states["deadline"] = one.label, rng.randrange(1 << 16)
        one.left, one.second.release = rng.random() < 0.5, one.second.release or (switched and rng.random() < 0.1)
        if rng.random() < 0.2:
            world.known.membership.bye(rng.randrange(1, ranks), one.label)
        for memory in (world.store.presence, world.store.slots):
            memory["op"][: rng.randrange(256)], memory["cookie"] = one.label, COOKIE
        one.second.gone(rng.randrange(ranks), rng.randrange(99), rng.randbytes(rng.randrange(12)))
        world.known.follow()
        world.fast.tb_begin_turn(world.terms.pointer, rng.randrange(2), rng.random() < 0.1)
        while found := world.fast.tb_next_op(world.terms.pointer, now):
            (one,) = (each for each in ops if each.label == world.terms.label)
            half = one.second if found == Found.FINISH else one.first
            half.phase = Phase.DONE if found in (Found.SEAL, Found.FINISH) else half.phase
        for each in ops:
            world.listen(each, now)
            for half in (each.first, each.second):
                assert all(flow.again <= 256 for flow in half.begun)
        for one in [one for one in ops if one.finished]:
            world.fast.tb_leave(world.terms.pointer, ctypes.addressof(one))
            ops.remove(one)


def main() -> None:
    path, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    library, rng = core.load(path), random.Random(seed)
    make = partial(Tables, library=library)
    for module in (control, queue, op, op_world, speaker, terms):
        module.core = lambda: library  # type: ignore[attr-defined]
    for switched in (False, True):
        _ops(rng, count // 2, switched=switched)
    _headers(rng, count)
    _answers(rng, count)
    _sends(rng, count)
    Twins(World(make=make), World(make=ReferenceTables)).live(rng, count)
    attack = Attack(World(make=make), World(make=ReferenceTables))
    attack.send(rng, count)
    attack.end()
    for tagged in (0, 1):
        world = World(make=make)
        world.arm()
        world.control(tagged=tagged)
        _buffers(world, rng, count)


if __name__ == "__main__":
    main()

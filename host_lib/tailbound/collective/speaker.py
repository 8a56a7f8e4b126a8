"""What one rank knows of its job and the others, and what it says: in headers, control packets, and to its kernel."""

from __future__ import annotations

import ctypes
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import OwnerMap
from tailbound.codec.scale import weights_of
from tailbound.collective.op import Op, Pending
from tailbound.collective.records import Records
from tailbound.collective.terms import Overtime, Repairs, Terms
from tailbound.datapath.protocol import Store
from tailbound.kernel.core import address, core
from tailbound.observe.events import Events
from tailbound.transport.config import Config
from tailbound.transport.control import Header, encode_needs, parse
from tailbound.transport.deadline import Deadlines
from tailbound.transport.keys import KeyRing, Stamps, Word
from tailbound.transport.membership import Membership
from tailbound.transport.queue import SendQueue
from tailbound.transport.sender import Sender
from tailbound.transport.sequence import Place, Sequence
from tailbound.transport.steps import OLD, STEP_MASK, Steps
from tailbound.wire import schema
from tailbound.wire.packets import record_of
from tailbound.wire.ranks import bitmap
from tailbound.wire.schema import HEADER_BYTES, OP_INDEX_BITS, OWN_MARKS, ROW_STEP, VOICE, Flag, PacketType, op_label
from tailbound.wire.tag import NO_KEY

#: Seals missed by the own row before it is no longer waited for (clock-8).
SELF_LATE_AFTER = 3
#: A control packet's stamp, in a job with a key: in the place of fields that only rows have.
_STAMP, _STAMP_AT = struct.Struct(">Q"), Header.exponent.offset
assert Header.count.offset == _STAMP_AT + _STAMP.size


Marks, Voice = record_of(OWN_MARKS), record_of(VOICE)


class Speaker:
    """What one rank knows, and what it says of it.

    The window, the inbox and the channels see a ``Speaker`` and no ``Job``: nothing in it codes, sums or
    queues rows.

    Args:
        config: settings.
        store: of the datapath.
        sender: sends.
        cookie: of the job.
        keys: of the job, where it has a key.
        now: CLOCK_MONOTONIC in ns, the clock that the kernel's stamps use too; a simulation brings its own.

    Attributes: beside those that say what they are.
        rank, ranks: own rank, and how many contribute.
        peers: the others, beginning with the rank after the own one.
        switch: rank of the job's switch; None: there is none.
        world: ranks that can own rows: with a switch, one more than those that contribute.
        weights: what sums have room for.
        queue: all that is sent leaves by it; of a ``Job``.
    """

    queue: SendQueue

    def __init__(
        self,
        config: Config,
        store: Store,
        sender: Sender,
        cookie: int,
        now: Callable[[], int] = time.monotonic_ns,
        keys: KeyRing | None = None,
    ) -> None:
        self.config, self.cookie = config, cookie
        self.rank, self.ranks = config.rank, config.ranks
        self.peers = [(self.rank + i) % self.ranks for i in range(1, self.ranks)]
        self.switch = self.ranks if config.switch is not None else None
        self.world = self.ranks + (config.switch is not None)
        self.weights = weights_of(self.ranks)
        self.store = store
        self.records = Records(store, cookie)
        self.membership = Membership(self.ranks, self.rank, config.suspect_after, config.hold_max)
        self.deadlines = Deadlines(config)
        self.overtime = Overtime(now(), config.floor)
        self.repairs = Repairs(self.world, config.floor)
        #: what the library decides about ops by
        self.terms = Terms(config, self.world, cookie, store, self.overtime, self.repairs.paths)
        #: scales that the next op of a key carries on where a switch sums
        self.exponents: dict[tuple[int, int, int, int], NDArray[np.int16]] = {}
        #: own ops in a row that were sealed without the own rows
        self.self_misses = 0
        #: rows of the smallest result and sums ring of all ranks: no more is in flight than these take
        self.least_rings = store.result_rows, store.sum_rows
        #: finished ops whose arrival stamps are still to be read
        self.pending: deque[Pending] = deque()
        #: the step whose ops are among them, and when it began
        self.sampled = -1, -(1 << 62)
        #: whether packets carry tags, as the kernel was told (auth-2)
        self.armed = False
        #: ops running of which the switch has sent nothing
        self.silent_ops = 0
        self._told: tuple[int, ...] = ()
        self.follow()
        self.now = now
        #: of the job; None: packets carry checks
        self.keys = keys
        self._stamps = Stamps()
        self.sender = sender
        owners = self.owners(tuple(range(self.ranks)), switched=True)
        self.sequence = Sequence(self.world, OwnerMap(0, owners), config.first_step)
        before = (self.sequence.next_label - 1) & 0xFFFFFFFF
        self.marks = Marks(before, before, before)
        self.counters: Counter[str] = Counter()
        self.events = Events(self.rank, now)
        first = self.sequence.map.id
        #: with all that packets have in common, and what every one says from now on
        self.head = Header(version=schema.VERSION, cookie=cookie, sender=self.rank, map_id=first, map_known=first)
        self.voice = Voice(
            self.terms.pointer,
            0,
            ctypes.addressof(self.head),
            ctypes.addressof(self.marks),
            width=store.width,
            requests=self.repairs.asked,
        )
        self._take_key()
        self.advertise_deadline(self.deadlines.advertised)
        self._live: tuple[list[int], int] | None = None

    # -- what is known ------------------------------------------------------------------------------------------------

    def owners(self, ranks: tuple[int, ...], *, switched: bool) -> tuple[int, ...]:
        """Owners by an owner map: ``ranks``, or (``switched``) the switch alone, if there is one."""
        return (self.switch,) if switched and self.switch is not None else ranks

    def switched(self, owner_map: OwnerMap) -> bool:
        """Whether rows of ops placed by ``owner_map`` go to the switch."""
        return self.switch is not None and self.switch in owner_map.owners

    def scales(self, op: Op) -> NDArray[np.int16] | None:
        """Scales of the op before, by which ``op`` is coded for a switch, i16[G]; None: ranks have to agree first."""
        known = self.exponents.get(op.key)
        return known if known is not None and len(known) == op.place.layout.shape.groups else None

    @property
    def row_bytes(self) -> int:
        """Bytes of the IP packet of a full row."""
        ip = schema.IPV6_BYTES if self.store.control["prefix"].any() else schema.IPV4_BYTES
        return ip + schema.UDP_BYTES + schema.HEADER_BYTES + self.store.width

    @property
    def self_late(self) -> bool:
        """Whether the own row is no longer waited for (clock-8)."""
        return self.self_misses >= SELF_LATE_AFTER

    def summed(self, op: Op) -> list[int]:
        """Own rows of ``op`` that hold a contribution, by rank."""
        found = (ctypes.c_int64 * self.world)()
        core().fast.tb_summed(self.terms.pointer, ctypes.addressof(op), found)
        return list(found)

    def hear(self, rank: int, now: int) -> None:
        """A word of ``rank`` has come."""
        self.terms.heard[rank] = now
        overtime = self.overtime
        core().fast.tb_spoke(ctypes.addressof(overtime), ctypes.addressof(overtime.open), rank, now)

    def spoke(self, rank: int) -> int:
        """When a word of ``rank`` was last read, ns; 0: never."""
        return self.terms.heard[rank]

    def newest(self, own: int) -> int:
        """The newest op label that a live rank has named, or ``own`` if none is newer."""
        return int(core().fast.tb_newest(self.terms.pointer, own))

    def age(self, step: int) -> None:
        """Dates what is old in ``step`` back (``OLD``), before it would seem to be still to come."""
        self.membership.age(step)
        oldest = np.uint32(op_label(step - OLD & STEP_MASK, 0))
        for mark in ("newest", "contributed", "published"):  # of ranks that have left
            marks = self.store.peer_states[mark]
            marks[(oldest - marks).view(np.int32) > 0] = oldest

    def follow(self) -> bool:
        """Tells the library what concerns all ops; returns whether it is another than before: all have news then."""
        members, deadlines, terms = self.membership, self.deadlines, self.terms
        told = members.changes, self.self_misses >= SELF_LATE_AFTER, deadlines.quiet, deadlines.start_max
        if told == self._told:  # asked for many times an op
            return False
        self._told = told
        _, terms.self_late, terms.silence, terms.start_max = told
        terms.live, terms.owners, terms.gone = bitmap(members.live), bitmap(members.owners), bitmap(members.gone)
        terms.voters, terms.suspects = bitmap(members.voters), bool(members.suspects)
        return True

    # -- the others ---------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> Steps:
        """Where this rank stands now beside the others; may be asked by any thread."""
        own = self.sequence.upcoming
        return Steps(own, self.newest(own), self.sequence.op_rows, self.store.result_rows)

    @property
    def in_step(self) -> bool:
        """Whether no live peer is in a newer step; only then a rank suspects others and learns (clock-5, clock-14)."""
        own = self.sequence.upcoming
        return self.newest(own) >> OP_INDEX_BITS == own >> OP_INDEX_BITS  # it is never older

    def beyond(self, rank: int) -> bool:
        """Whether ``rank`` is so far behind that its kernel takes no results of the present any more."""
        its = int(self.records.peer_states[rank]["newest"])
        return Steps(its, self.sequence.upcoming, self.sequence.op_rows, self.store.result_rows).lost

    def header(self, kind: PacketType, label: int, layout: int, **fields: int) -> Header:
        """A header of this rank with its marks and advertisements."""
        marks = self.marks
        head: Header = Header.from_buffer_copy(self.head)
        head.type, head.op, head.layout = kind, label, layout
        head.contributed, head.published = marks.contributed, marks.published
        for name, value in fields.items():
            setattr(head, name, value)
        return head

    def announce(self, op: Op, peers: Iterable[int], *, asks: bool = False) -> None:
        """Sends READY for ``op`` to ``peers``, and ``asks`` for theirs (clock-2, clock-17, clock-25).

        It names an op without bringing rows: this rank has launched it. Every rank sends every peer at least one packet
        per op. Where rows do that, READY is only sent by a rank that is asked for its mark (clock-30). For a cold op,
        of a switch, it has the scale that each group needs.
        """
        body = encode_needs(op.needs.get(self.rank) if op.cold else None)
        flags = int(Flag.ABSTAIN if op.abstains else 0) | (Flag.OVERFLOW if op.outcome.overflowed else 0)
        if flags:
            core().fast.tb_remember(ctypes.addressof(self.voice), op.label, flags)  # peers that missed the word ask
        flags |= (Flag.LATE if op.outcome.late else 0) | (Flag.REPEAT if asks else 0)
        head = self.header(PacketType.READY, op.label, op.place.tag, flags=flags, seq=op.place.result_seq)
        for peer in peers:
            self.tell(peer, head, body)

    def farewell(self, label: int) -> None:
        """BYE, three times to every peer (clock-15)."""
        head = self.header(PacketType.BYE, label, 0)
        for peer in self.peers * 3:
            self.tell(peer, head)

    def tell(self, rank: int, head: Header, body: bytes = b"") -> bytes:
        """Sends one control packet to ``rank``, and returns it; ``head`` (see ``header``) may be used again."""
        data = self.word(rank, head, body)
        self.queue.say(rank, data)
        return data

    def word(self, rank: int, head: Header, body: bytes = b"") -> bytes:
        """One control packet for ``rank``, to be sent once."""
        out = ctypes.create_string_buffer(HEADER_BYTES + len(body) + ROW_STEP)
        size = core().fast.tb_write_word(
            ctypes.addressof(self.voice), rank, ctypes.addressof(head), body, len(body), out
        )
        return out.raw[:size]

    def letters(self) -> Iterator[bytes]:
        """Control packets that the library has left to Python, oldest first."""
        out = ctypes.create_string_buffer(HEADER_BYTES + self.store.width)
        while size := core().fast.tb_next_letter(ctypes.addressof(self.voice), out):
            yield out.raw[:size]

    def stamp(self) -> int:
        """A number for what is said elsewhere: above all of control packets before it (auth-5); without a key 0."""
        return 0 if self.keys is None else int(core().fast.tb_next_stamp(ctypes.addressof(self.voice)))

    def stamps(self, rank: int) -> tuple[int, int]:
        """``stamp``, and the newest one known of ``rank``."""
        return self.stamp(), self._stamps.newest.get(rank, 0)

    def unpack(self, data: bytes) -> tuple[Header, bytes] | None:
        """Header and body of a packet whose check or tag is right, else None."""
        return parse(data, () if self.keys is None else self.keys.both)

    def fresh(self, head: Header) -> Word:
        """Whether a control packet, which is authentic, is none that was recorded and sent again (auth-5).

        HELLO may be repeated, and HOLD as long as nothing newer was said. Tries of a path overtake other packets, since
        they leave as rows do.
        """
        if self.keys is None or head.type == PacketType.HELLO:
            return Word.NEW
        word = self._stamps.accept(head.sender, *_STAMP.unpack_from(head, _STAMP_AT))
        holds = head.type == PacketType.HOLD and not head.flags & Flag.FLUSH
        return Word.OLD if word == Word.AGAIN and not holds else word

    def present(self, rank: int, stamp: int) -> None:
        """``rank``, which made ``stamp`` just now, is there: what it said before, or its process before, is void."""
        if self.keys is not None and self._stamps.accept(rank, stamp) != Word.OLD:
            self.membership.present(rank)
            self.publish_live()

    def key_of(self, place: Place) -> NDArray[np.uint64]:
        """What packets of an op are tagged with; empty: they carry checks."""
        return NO_KEY if self.keys is None else self.keys.of(place.placement.owner_map.turns)

    def turn_keys(self, step: int, turns: int) -> None:
        """This rank has come as far as ``step``, under an owner map with so many turns of keys (auth-4, auth-8)."""
        if self.keys is not None:
            self.counters["keys_turned"] += self.keys.advance(step, turns)
            self._take_key()

    def _take_key(self) -> None:
        """Words have tags by the key of this rank's present epoch."""
        self._key = NO_KEY if self.keys is None else self.keys.now
        self.voice.key = address(self._key)

    def advertise_deadline(self, deadline: int) -> None:
        """Writes D1 (ns) into every header from now on, and for the own ops (clock-6)."""
        self.terms.advertised = deadline
        self.head.deadline = min(0xFFFF, -(-deadline // (schema.TIME_UNIT_US * 1000)))

    def misses_map(self, ranks: Iterable[int]) -> bool:
        """Whether one of ``ranks`` knows of a newer owner map: rows under it are refused here until it is told."""
        known, own = self.records.peer_states["map_known"], self.sequence.newest_map
        return any(schema.serial_distance(int(known[rank]), own) > 0 for rank in ranks)

    # -- the kernel ---------------------------------------------------------------------------------------------------

    def publish_live(self) -> None:
        """Writes the live set to the kernel, for completion, tails and the majority clock."""
        live, need = self.membership.live, self.membership.majority
        if (live, need) == self._live:
            return
        self._live = live, need
        control, peers = self.store.control, self.store.peers
        for rank in self.peers:
            peers[rank]["live"] = rank in live
        control["live"][0] = bitmap(live)
        control["live_peers"] = len(live)
        control["need"] = need
        self.terms.live_since = self.now()  # what began before may have been counted by older words

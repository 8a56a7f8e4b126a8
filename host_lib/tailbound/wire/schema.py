"""The one place where the wire format and the kernel's maps are written down.

Everything else is derived: ``ebpf/wire.h``, ``ebpf/abi.h`` and ``host_lib/core/records.h`` are generated (``make
generate``), numpy dtypes (``tailbound.wire.packets``) are made at import.
This module holds data only and imports nothing but the standard library.

Numbers, once released, are never reused; a field that goes leaves a hole.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

#: Version byte of every packet. Another version is dropped as ``BAD_VERSION``.
VERSION = 1
#: What HELLO packets say, by number: ranks of another one are refused when they greet each other. 3: with weights.
HELLO_NUMBER = 3
#: UDP port of a job unless another is given.
DEFAULT_PORT = 5515
#: First byte after the UDP header is the version; a magic in the cookie would only repeat the cookie check.
HEADER_BYTES = 64
#: Ethernet, IPv4 without options, IPv6 without extension headers, and UDP, in bytes.
ETHERNET_BYTES, IPV4_BYTES, IPV6_BYTES, UDP_BYTES = 14, 20, 40, 8
#: Ranks in a job at most: 257 x 255 = 65535 would allow one more, the bitmaps hold 256.
MAX_RANKS = 256
#: Sender under which packets are counted whose sender cannot be trusted yet.
UNKNOWN_SENDER = MAX_RANKS
#: Payload width is a multiple of this many codes; rows may be shorter, in steps of ``ROW_STEP``.
WIDTH_STEP = 64
ROW_STEP = 16
#: Op label = step << OP_INDEX_BITS | index, compared by signed distance of u32.
OP_INDEX_BITS = 10
#: Op records: OP_STEPS steps of OP_PER_STEP ops each, addressed by ``op_slot``.
OP_STEPS = 4
OP_PER_STEP = 256
OP_RING = OP_STEPS * OP_PER_STEP
#: Words of u64 of a key before those of a row: SipHash's two, the epoch's flag, one for each word of the header.
KEY_WORDS = 2 + 1 + HEADER_BYTES // 8
#: Keys in force at once, by the parity of their epochs.
KEY_EPOCHS = 2
#: A scale exponent that says "nothing known" (all zero, or never measured).
EXPONENT_NONE = -32768
#: Quarter powers of two that a scale for a switch leaves above the largest need: more costs precision in every op, less
#: clips what grows from one op to the next.
HEADROOM = 4
#: Lateness and deadlines travel in units of this many microseconds (u16: up to 4.19 s).
TIME_UNIT_US = 64
#: Ring buffer for events, in bytes (a power of two and a multiple of the page size).
EVENT_RING_BYTES = 65536
#: Contexts (UDP ports) on one interface. A second attach is refused by name.
CONTEXTS = 1
#: ``control.active`` of a job that ends with the socket at its port, however its process ends; 1: it does not.
ACTIVE_WITH_SOCKET = 2
#: Jobs of one switch at once.
SWITCH_JOBS = 8


class PacketType(enum.IntEnum):
    """What a packet is. Contributions and results end in the kernel; the rest passes to the socket."""

    CONTRIBUTION = 1
    RESULT = 2
    READY = 3
    REPAIR = 4
    GONE = 5
    MAP = 6
    HOLD = 7
    BYE = 8
    PROBE = 9
    ECHO = 10
    HELLO = 12  #: tries of the way: small, as wide as a row, and in bursts; `count` and `seq` answer the receiver's own


class Flag(enum.IntEnum):
    """Bits of the header's ``flags``; plain numbers, since arithmetic on an IntFlag costs microseconds."""

    FLUSH = 1
    ABSTAIN = 2
    REPEAT = 4
    LATE = 8
    SKIP = 16  #: result: its owner summed too little of this op, nobody is to apply it
    STOP = 32  #: result: beyond the limit at which training is to stop
    COMPLAINT = 64  #: hello: the receiver's bursts do not arrive here
    FIRST_HALF = 128  #: repair, gone: contributions are meant, not results
    SUMS = 256  #: result of a switch: u16 sums of the codes, big-endian, in code order
    SWITCHED = 512  #: result of a switch: mean codes, in the contributions' scale
    OVERFLOW = 1024  #: ready, gone, result: a rank's gradient of this op is not finite
    HALVES = 2048  #: contribution: two codes of 4 bits a byte
    EPOCH = 4096  #: with a tag: which of the two keys in force it was made with
    QUORUM = 8192  #: result: a majority of the job's ranks has part in its owner's rows


class Fate(enum.StrEnum):
    """What became of a row. The rows that a peer should have brought are TAKEN or one of ``MISSING``."""

    meaning: str
    advice: str

    def __new__(cls, name: str, meaning: str, advice: str = "Nothing to do") -> Fate:
        """Make a member whose value is ``name``."""
        self = str.__new__(cls, name)
        self._value_, self.meaning, self.advice = name, meaning, advice
        return self

    # fmt: off
    TAKEN = "taken", "the row came in time"
    LATE = "late", "the row came after its half of the op had ended", (
        "Look at the sender's host: other processes, clock rate, data loading")
    LOST = "lost", "the sender had sent all of its rows, and this one never came", (
        "Look at the cable, port and queues: ethtool -S, tc -s qdisc")
    REFUSED = "refused", "the row came, and a rule refused it", (
        "Look up the reasons of stats()['drops_by_sender'] below, in docs/wire.md")
    ABSENT = "absent", "the row has not come, and its sender had not sent all of its rows", (
        "Look at the sender: is it slow, stopped or gone?")
    DUPLICATED = "duplicated", "a copy of the row was there already"
    UNTRUSTED = "untrusted", "the sender cannot be trusted; a peer's row in the packet counts as lost or absent", (
        "Find the sender: tcpdump at the job's UDP port")
    CONTROL = "control", "the packet brings no row"
    # fmt: on


#: Fates of the rows that a peer should have brought and that were not there in time.
MISSING = (Fate.LATE, Fate.LOST, Fate.REFUSED, Fate.ABSENT)


class Stage(enum.IntEnum):
    """Half of an op: contributions to the own rows, by sender; results of the others' rows, by owner."""

    CONTRIBUTIONS = 0
    RESULTS = 1


_FIRST, _SECOND, _BOTH = (Stage.CONTRIBUTIONS,), (Stage.RESULTS,), tuple(Stage)
_VERSIONS = "Install one version of Tailbound on all hosts"
_OTHER_JOB = "End the other job at this address and port, or give it another port"
_MISSED = "A few: nothing to do; many: look for ranks that miss whole ops"
_AHEAD = "Give a larger ring_mib on all ranks, or find out why this rank is behind"
_MTU = "Set a smaller TAILBOUND_MTU on all ranks (docs/xdp.md)"


class Verdict(enum.IntEnum):
    """Ledger columns: what became of a packet of ours. From ``BAD_LENGTH`` on they are drop reasons.

    Each has a ``fate``, the ``stages`` whose rows it concerns, a ``meaning`` and an ``advice`` (by default its fate's).
    """

    fate: Fate
    stages: tuple[Stage, ...]
    meaning: str
    advice: str

    def __new__(
        cls, number: int, fate: Fate = Fate.CONTROL, stages: tuple[Stage, ...] = (), meaning: str = "", advice: str = ""
    ) -> Verdict:
        """Make a member whose value is ``number``."""
        self = int.__new__(cls, number)
        self._value_, self.fate, self.stages = number, fate, stages
        self.meaning, self.advice = meaning, advice or fate.advice
        return self

    # fmt: off
    STORED = 0, Fate.TAKEN, _FIRST, "the first contribution to a sum"
    ADDED = 1, Fate.TAKEN, _FIRST, "a contribution was added to its sum"
    RESULT_TAKEN = 2, Fate.TAKEN, _SECOND, "a result was copied"
    CONTROL_PASSED = 3, Fate.CONTROL, (), "the packet went on to the process"
    REFLECTED = 4, Fate.CONTROL, (), "a probe was sent back as an echo"
    ECHO_TAKEN = 5, Fate.CONTROL, (), "an echo gave a round trip"
    ANSWERED = 6, Fate.DUPLICATED, _FIRST, "switch: the row was final, its sender was sent the mean again"
    FLUSHED = 7, Fate.CONTROL, (), "switch: a flush added nothing and released the row"
    BAD_LENGTH = 8, Fate.UNTRUSTED, (), "lengths do not agree, or the payload is wider than the program", (
        "Attach a program as wide as the job's rows, on all ranks")
    NOT_LINEAR = 9, Fate.UNTRUSTED, (), "the driver handed over the frame in pieces", _MTU
    BAD_VERSION = 10, Fate.UNTRUSTED, (), "another version of the wire format", _VERSIONS
    BAD_TYPE = 11, Fate.UNTRUSTED, (), "no type of packet has this number", _VERSIONS
    WRONG_COOKIE = 12, Fate.UNTRUSTED, (), "a packet of another job", _OTHER_JOB
    UNKNOWN_RANK = 13, Fate.UNTRUSTED, (), "the sender is not another rank of this job", _OTHER_JOB
    WRONG_ADDRESS = 14, Fate.UNTRUSTED, (), "the address is not the one that the sender has registered", (
        "See whether addresses are translated on the way; set TAILBOUND_INTERFACE")
    NOT_FOR_THIS_RANK = 15, Fate.REFUSED, _BOTH, "the row is for another rank", (
        "See whether a switch or a route sends packets to the wrong host")
    CORRUPT = 16, Fate.UNTRUSTED, (), "the check over header and payload is wrong", (
        "Look at the cable and at the interface: ethtool -S")
    SLOT_OUT_OF_RANGE = 17, Fate.REFUSED, _BOTH, "the row's place is not in its op or its ring", (
        "Register the same model and ring_mib on all ranks")
    STALE_OP = 18, Fate.LATE, _FIRST, "a contribution to an op that newer ones have replaced"
    FUTURE_OP = 19, Fate.REFUSED, _FIRST, "a contribution further ahead than this rank's ring or records reach", _AHEAD
    DUPLICATE = 20, Fate.DUPLICATED, _FIRST, "the sender's contribution was there already"
    LATE = 21, Fate.LATE, _FIRST, "a contribution to an op that was sealed"
    SCALE_MISMATCH = 22, Fate.REFUSED, _FIRST, "switch: a contribution with another scale exponent than the sum's", (
        _MISSED)
    BAD_WEIGHT = 23, Fate.REFUSED, _FIRST, "a contribution's weight is 0, or more than its sum can hold", _VERSIONS
    LAYOUT_MISMATCH = 24, Fate.REFUSED, _BOTH, "another layout of the op than this rank's", (
        "Register the same model and options on all ranks")
    WRONG_MAP = 25, Fate.REFUSED, _BOTH, "a row under another owner map than the op's", (
        "A few at a change of maps: nothing to do; many: see who is behind (state, in `tailbound top`)")
    ABANDONED = 26, Fate.REFUSED, _FIRST, (
        "switch, counted besides: the row took the place of one that was not final"), _MISSED
    DUPLICATE_RESULT = 27, Fate.DUPLICATED, _SECOND, "the result was there already"
    STALE_RESULT = 28, Fate.LATE, _SECOND, "a result of an op that newer ones have replaced"
    FUTURE_RESULT = 29, Fate.REFUSED, _SECOND, "a result whose place an older op still needs", _AHEAD
    INACTIVE = 30, Fate.UNTRUSTED, (), "no job runs here, or its process has ended", (
        "Before and after a job: nothing to do; during it: start this rank again")
    FRAGMENT = 31, Fate.UNTRUSTED, (), "an IP fragment", _MTU
    DUPLICATE_REPAIR = 32, Fate.DUPLICATED, _FIRST, "a contribution came again on request, after the first copy"
    DUPLICATE_REPAIR_RESULT = 33, Fate.DUPLICATED, _SECOND, "a result came again on request, after the first copy"
    FORGED = 34, Fate.UNTRUSTED, (), (
        "the tag is wrong: its sender lacks the key, or the packet was changed on the way"), (
        "Find who else sends on this network: docs/security.md")
    # fmt: on


#: Ledger columns per (cpu, sender); room for reasons to come.
VERDICTS = 64
FIRST_DROP = Verdict.BAD_LENGTH


class Event(enum.IntEnum):
    """Ring-buffer events. A hint only: the maps are the truth."""

    OPENED = 1  #: first packet of an op
    MAJORITY = 2  #: ``need`` or ``need - 1`` live peers have been heard in an op
    TAIL = 3  #: the last percent of every live peer's contributions has been seen
    COMPLETE = 4  #: every own row has a contribution of every live peer
    RESULTS_TAIL = 5  #: the last percent of every live owner's results has been seen
    RESULTS_COMPLETE = 6  #: as many result rows as ``expect_results`` says are in


@dataclass(frozen=True)
class Field:
    """One field: name, kind (``u8 u16 u32 u64 s16 s32 f32``), array length, meaning."""

    name: str
    kind: str
    doc: str
    count: int = 1


@dataclass(frozen=True)
class Struct:
    """A C struct with natural alignment and no implicit padding (``make generate`` refuses holes)."""

    name: str
    doc: str
    fields: tuple[Field, ...]


#: A number as a product: of numbers, and of what a machine or a job decides, by name (``sum_rows``, ``cpus``).
Product = tuple[int | str, ...]


@dataclass(frozen=True)
class Map:
    """A BPF map of ``entries`` values; ``packets.layout`` has its numpy dtype and shape.

    Attributes:
        value: a struct's name, or ``u8``: then as many bytes as ``width`` says.
        entries: knows ``sum_rows``, ``result_rows``, ``width``, ``key_bytes`` and ``cpus``; a switch's also
            ``slots`` and ``ports``.
        writer: ``program`` (frozen at creation, so that the trainer can only read), ``host`` or ``both``.
        mmap: mapped into the process.
        secret: programs can only read it, and processes only write it.
    """

    name: str
    doc: str
    value: str
    entries: Product
    writer: str
    mmap: bool = True
    width: Product = ()
    secret: bool = False


#: Fields of the 64-byte header, network byte order.
HEADER = Struct(
    "tb_header",
    "Header of every Tailbound packet, after UDP, network byte order.",
    (
        Field("version", "u8", "VERSION"),
        Field("type", "u8", "PacketType"),
        Field("flags", "u16", "Flag bits"),
        Field("cookie", "u32", "the job, drawn at random by rank 0"),
        Field("op", "u32", "op label: step << 10 | index, a serial number"),
        Field("layout", "u16", "hash of (bucket index, numel, dtype, chunk, world size)"),
        Field("sender", "u8", "rank that sent this packet"),
        Field("owner", "u8", "contribution: the rank it is for; result: the owner that made it"),
        Field(
            "seq",
            "u32",
            "row sequence: ring position = seq mod ring (sums ring or result ring); echo: packets of the prober that "
            "came with CE",
        ),
        Field("row", "u16", "place of the packet in its sender's order; result: and of the row in its owner's list"),
        Field("rows", "u16", "rows of this owner in this op"),
        Field("contributed", "u32", "highest op whose contributions the sender has fully sent to this peer"),
        Field("published", "u32", "highest op whose results the sender has fully sent to this peer"),
        Field(
            "exponent",
            "s16",
            "contribution: e of its scale, for an owner a multiple of 4; result: e of the group for the key's next op",
        ),
        Field("need", "s16", "contribution: largest e this rank would have needed, EXPONENT_NONE if all zero"),
        Field(
            "scale",
            "f32",
            "of the row (result; negative: with offsets), of the group (contribution to a switch): value of code 255",
        ),
        Field(
            "count",
            "u16",
            "result: contributors in the mean; contribution to a switch: contributors that complete the row, 0 for all "
            "workers of the job; any other contribution: 0",
        ),
        Field("weight", "u8", "contribution: what codes are multiplied by, at least 1, and 1 for a switch"),
        Field("pad", "u8", "0"),
        Field("deadline", "u16", "advertised D1 in units of 64 us"),
        Field("lateness", "u16", "own lateness (launch minus majority arrival) in units of 64 us"),
        Field("map_id", "u32", "owner map of this op"),
        Field("map_known", "u32", "highest owner map id known in full"),
        Field("check", "u64", "check over payload and header (tailbound.wire.check), or with a key the tag (wire.tag)"),
    ),
)

SLOT_RECORD = Struct(
    "tb_slot",
    "Record of one summed row; written by the program only, under the slot's lock.",
    (
        Field("cookie", "u32", "tag, with op"),
        Field("op", "u32", "tag, with cookie"),
        Field("ranks", "u64", "bitmap of the ranks summed", 4),
        Field("count", "u32", "ranks summed"),
        Field("units", "u32", "what a lane holds in whose column every rank summed sent code 128"),
        Field("pad", "u32", "0"),
        Field("exponent", "s32", "e of a lane's unit"),
        Field("row", "u32", "place in the first sender's order"),
        Field("counted", "u32", "1 once the sum has had a contribution of every live peer: it is in rows_complete"),
    ),
)

SLOT_LOCK = Struct(
    "tb_slot_lock",
    "Lock of one sum slot, and the newest op the host has sealed there. Not mmapped: it holds a lock.",
    (Field("lock", "lock", "struct bpf_spin_lock"), Field("sealed_op", "u32", "contributions up to this op are late")),
)

PLAIN_LOCK = Struct(
    "tb_lock",
    "A lock and nothing else (result rows, op records, peers).",
    (Field("lock", "lock", "struct bpf_spin_lock"), Field("pad", "u32", "0")),
)

RESULT_RECORD = Struct(
    "tb_result",
    "Record of one result row; written by the program only, under the row's lock.",
    (
        Field("cookie", "u32", "tag, with op"),
        Field("op", "u32", "tag, with cookie"),
        Field("scale", "f32", "largest absolute value of the row, negative with offsets"),
        Field("count", "u32", "contributors in the mean"),
        Field("exponent", "s32", "e for the key's next op"),
        Field("owner", "u32", "rank that made it"),
        Field("row", "u32", "place in the owner's list"),
        Field("flags", "u32", "flags of its header"),
    ),
)

PRESENCE = Struct(
    "tb_presence",
    "Which result is whole in a ring position; written after the row, as one word, under the row's lock.",
    (Field("op", "u32", "op label"), Field("cookie", "u32", "job")),
)

OP_RECORD = Struct(
    "tb_op",
    "What the kernel has seen of one op; written by the program, under a lock but for counts, its tag last.",
    (
        Field("cookie", "u32", "tag, with op"),
        Field("op", "u32", "tag, with cookie"),
        Field("opened_ns", "u64", "CLOCK_MONOTONIC of the first packet"),
        Field("heard", "u64", "bitmap of ranks heard in this op, by any packet type that names it", 4),
        Field("tail_contributed", "u64", "ranks the tail of whose contributions has been seen", 4),
        Field("tail_published", "u64", "ranks the tail of whose results has been seen", 4),
        Field("abstained", "u64", "ranks that said ABSTAIN for this op", 4),
        Field("begun", "u64", "ranks of whom a contribution row has been seen", 4),
        Field("majority_ns", "u64", "time at which need - 1 [0] and need [1] live peers had been heard", 2),
        Field("heard_live", "u32", "live peers heard"),
        Field("rows", "u32", "rows of this owner, from the first contribution; 0 before"),
        Field("results_tag", "u32", "of what results_in counts, in one word with it: cookie ^ op"),
        Field("results_in", "u32", "result rows present"),
        Field("rows_complete", "s32", "own rows that have had a contribution of every live peer, each counted once"),
        Field("progress", "u32", "packets taken for own rows; a hint that may lose an increment"),
        Field("layout", "u32", "layout tag of the first packet"),
        Field("codes", "u32", "V of the first row"),
        Field("first_sender", "u32", "rank that opened the op"),
        Field("late", "u32", "contribution rows refused as late or behind the window; a hint as progress is"),
        Field("late_results", "u32", "result rows behind the window; a hint as progress is"),
        Field("pad", "u32", "0"),
    ),
)

ARRIVAL = Struct(
    "tb_arrival",
    "Arrival times of one rank in one op, in us after opened_ns, plus one (0: not yet).",
    (
        Field("first_us", "u32", "first packet"),
        Field("contributed_us", "u32", "tail of contributions"),
        Field("published_us", "u32", "tail of results"),
        Field("row_us", "u32", "first row of contributions, or the word that it would be late"),
    ),
)

PEER = Struct(
    "tb_peer",
    "A registered rank; written by the host.",
    (
        Field("address", "u32", "IPv4 address, or the last 32 bits of an IPv6 one; network byte order"),
        Field("live", "u32", "1: counted for completion, tail and majority"),
        Field("prefix", "u32", "the first 96 bits of an IPv6 address; 0, and address too: not registered", 3),
        Field("pad", "u32", "0"),
    ),
)

PEER_STATE = Struct(
    "tb_peer_state",
    "Latest marks of one rank; written by the program under the peer's lock when they rise; the host redates old ones.",
    (
        Field("cookie", "u32", "tag"),
        Field("contributed", "u32", "highest contributed mark seen"),
        Field("published", "u32", "highest published mark seen"),
        Field("newest", "u32", "newest op seen, future ones included"),
        Field("last_ns", "u64", "time of the last change here"),
        Field("rtt_ns", "u64", "last round trip measured by probe"),
        Field("echoed", "u64", "time at which the newest own probe was sent that has come back, ns"),
        Field("deadline", "u32", "advertised D1, units of 64 us"),
        Field("lateness", "u32", "advertised lateness, units of 64 us"),
        Field("map_known", "u32", "highest map id the rank knows"),
        Field("pad", "u32", "0"),
        Field("marked", "u32", "packets of the rank that came with CE (congestion experienced), its echoes apart"),
        Field("told", "u32", "own packets that came to the rank with CE, as its last echo said"),
    ),
)

CONTROL = Struct(
    "tb_control",
    "One context; written by the host, mmapped, `active` last. The program clears that and `tagged`.",
    (
        Field("active", "u32", "0: drop all of ours as INACTIVE; ACTIVE_WITH_SOCKET: 0 once the job has no socket"),
        Field("cookie", "u32", "job"),
        Field("rank", "u32", "own rank"),
        Field("ranks", "u32", "world size"),
        Field("address", "u32", "own address, as in tb_peer; kept between jobs; what is for others passes"),
        Field("group", "u32", "the job's multicast group, network byte order, or 0"),
        Field("map_id", "u32", "owner map in force"),
        Field("map_since", "u32", "first op of map_id; older ops are taken under map_before"),
        Field("map_before", "u32", "owner map before that"),
        Field("sum_base", "u32", "window base of the sums ring, a row sequence"),
        Field("result_base", "u32", "window base of the result ring, a row sequence"),
        Field("live_peers", "u32", "live ranks other than this one"),
        Field("need", "u32", "majority: floor(V / 2) + 1 with V ranks that have a vote"),
        Field("weight_cap", "u32", "largest weight taken"),
        Field("spare", "u32", "F, 0..7: doublings of weight_cap that lanes have room for"),
        Field("first_op", "u32", "ops before this one are stale"),
        Field("released", "u32", "newest op over here: late rows may open its record; records reach OP_STEPS further"),
        Field("sum_rows", "u32", "sums ring in use, a power of two: pinned maps may have been made for fewer ranks"),
        Field("tagged", "u32", "1: packets carry tags, and both keys are in force; 0: they carry checks"),
        Field("prefix", "u32", "what is before address in an own IPv6 address; 0 for IPv4", 3),
        Field("live", "u64", "bitmap of live ranks other than this one", 4),
    ),
)

EXPECT_RESULTS = Struct(
    "tb_expect_results",
    "How many result rows of an op are to come from peers; written by the host.",
    (Field("op", "u32", "op label"), Field("rows", "u32", "rows; 0: not known yet")),
)

LEDGER = Struct(
    "tb_ledger",
    "Counters of one (cpu, sender): what became of its packets.",
    (Field("verdict", "u64", "by Verdict", VERDICTS),),
)

EVENT = Struct(
    "tb_event",
    "A record of the event ring.",
    (Field("kind", "u32", "Event"), Field("op", "u32", "op label"), Field("ns", "u64", "CLOCK_MONOTONIC")),
)

FAULTS = Struct(
    "tb_faults",
    "Fault injection on one interface of the lab; written by the lab. Probabilities in units of 2^-32.",
    (
        Field("state", "u64", "xorshift64* state per map; seeded, never 0"),
        Field("loss_good", "u32", "loss in the good state (Bernoulli: the loss)"),
        Field("loss_bad", "u32", "loss in the bad state"),
        Field("to_bad", "u32", "per packet, good to bad (Gilbert-Elliott)"),
        Field("to_good", "u32", "per packet, bad to good"),
        Field("duplicate", "u32", "send twice"),
        Field("corrupt", "u32", "flip one bit after the UDP header"),
        Field("port", "u32", "only UDP to or from this port; 0: every IPv4 packet"),
        Field("bad", "u32", "1 while in the bad state"),
        Field("reorder", "u32", "let others pass it, or pass others (UDP only)"),
        Field("pad", "u32", "0"),
        Field("last", "u64", "CLOCK_MONOTONIC of the newest packet that faults could hit"),
        Field("rate", "u64", "bytes per second of the port that packets wait before; 0: none is modelled"),
        Field("free", "u64", "CLOCK_MONOTONIC at which it has sent all that came"),
        Field("queue", "u32", "bytes that wait before it at most"),
        Field("mark", "u32", "bytes above which what may be marked is (CE); 0: nothing is"),
    ),
)

FAULT_COUNTS = Struct(
    "tb_fault_counts",
    "What the fault program did, per cpu.",
    (
        Field("seen", "u64", "packets that faults could hit"),
        Field("lost", "u64", "dropped"),
        Field("duplicated", "u64", "sent twice"),
        Field("corrupted", "u64", "one bit flipped"),
        Field("passed", "u64", "packets outside the filter"),
        Field("reordered", "u64", "sent past the queue"),
        Field("lost_other", "u64", "of the lost, those that are not UDP"),
        Field("overflowed", "u64", "dropped because the port's queue was full"),
        Field("marked", "u64", "marked (CE)"),
    ),
)

FANOUT = Struct(
    "tb_fanout",
    "Which bursts leave for all live peers; written by the host, mmapped. `active` is written last.",
    (
        Field("active", "u32", "0: nothing is cloned"),
        Field("address", "u32", "source of the bursts: own address, as in tb_peer"),
        Field("port", "u16", "source of the bursts: their UDP port, host byte order"),
        Field("lead", "u16", "the rank that bursts are addressed to; what goes to others is left alone"),
        Field("copies", "u32", "entries of order"),
        Field("prefix", "u32", "what is before address in an own IPv6 address", 3),
        Field("pad", "u32", "0"),
        Field("order", "u8", "live ranks other than the lead, in the order in which copies leave", MAX_RANKS),
    ),
)

FANOUT_PEER = Struct(
    "tb_fanout_peer",
    "Where copies for one rank go; the host writes addresses, the program the way there.",
    (
        Field("address", "u32", "as in tb_peer; 0, and prefix too: nobody"),
        Field("mac", "u8", "Ethernet address of the next hop, as the host's own packets to this rank have it", 6),
        Field("pad", "u16", "0"),
        Field("prefix", "u32", "as in tb_peer", 3),
    ),
)

FANOUT_COUNTS = Struct(
    "tb_fanout_counts",
    "What left for one rank, per cpu.",
    (
        Field("leads", "u64", "bursts that were addressed to it and went on to the others"),
        Field("clones", "u64", "copies that the device took"),
        Field("failed", "u64", "copies that it did not take, or that could not be made"),
        Field("packets", "u64", "packets in the clones"),
        Field("packets_failed", "u64", "packets in the failed ones"),
    ),
)

SWITCH_DIRECTORY = Struct(
    "tb_switch_directory",
    "The jobs of a switch as packets name them; written by the host, cookies last.",
    (
        Field("cookie", "u32", "job; 0: none", SWITCH_JOBS),
        Field("address", "u32", "of the switch in it, as in tb_peer", SWITCH_JOBS),
        Field("port", "u32", "its UDP port, network byte order", SWITCH_JOBS),
        Field("prefix", "u32", "as in tb_peer, three words of each job", 3 * SWITCH_JOBS),
    ),
)

SWITCH_JOB = Struct(
    "tb_switch_job",
    "A job of a switch; written by the host.",
    (
        Field("ranks", "u32", "workers N; the switch is rank N"),
        Field("base", "u32", "first slot"),
        Field("mask", "u32", "slots - 1, a power of two less one"),
        Field("headroom", "u32", "e of the next op: largest need plus this"),
        Field("address", "u32", "of the switch, as in tb_peer"),
        Field("mac", "u8", "Ethernet address of the switch", 6),
        Field("port", "u16", "UDP port, network byte order"),
        Field("prefix", "u32", "as in tb_peer", 3),
    ),
)

SWITCH_RANK = Struct(
    "tb_switch_rank",
    "A worker of a job, by rank (who may send) or by port (where a copy goes); written by the host.",
    (
        Field("address", "u32", "as in tb_peer; 0, and prefix too: nobody"),
        Field("ifindex", "u32", "the port towards it, by which alone it may send"),
        Field("mac", "u8", "its Ethernet address", 6),
        Field("rank", "u16", "which"),
        Field("prefix", "u32", "as in tb_peer", 3),
        Field("pad", "u32", "0"),
    ),
)

SWITCH_SLOT = Struct(
    "tb_switch_slot",
    "Record of one row in a switch; written by the program only, under the slot's lock.",
    (
        Field("cookie", "u32", "tag, with seq"),
        Field("seq", "u32", "tag, with cookie: row sequence"),
        Field("op", "u32", "op label"),
        Field("layout", "u16", "layout tag"),
        Field("row", "u16", "place in the op"),
        Field("rows", "u16", "rows of the op"),
        Field("codes", "u16", "V: codes of the row"),
        Field("count", "u16", "ranks summed"),
        Field("final", "u16", "1: released; the mean stands where the sums stood, and never changes"),
        Field("ranks", "u64", "bitmap of the ranks summed", 4),
        Field("need", "s16", "largest need seen"),
        Field("exponent", "s16", "e of the contributions summed"),
        Field("scale", "f32", "2 ** (e / 4), as the first contributor said it"),
    ),
)

SWITCH_PORT = Struct(
    "tb_switch_port",
    "Counters of one (cpu, port) of a switch.",
    (
        Field("ours", "u64", "packets for the switch"),
        Field("foreign", "u64", "packets passed on untouched"),
        Field("results", "u64", "results that left by it, answers and echoes included"),
        Field("answers", "u64", "packets from it that were answered to their sender alone"),
    ),
)

#: All but the header, and those of the library alone.
STRUCTS = tuple(each for each in list(globals().values()) if isinstance(each, Struct) and each is not HEADER)

STAMP = Struct(
    "tb_stamp",
    "What headers are made of; arrays by their address, 0: none.",
    (
        Field("packets", "u64", "u8[][stride]: payloads are in place, headers are written"),
        Field("states", "u64", "u64[][4]: what the payloads left of their checks or tags"),
        Field("head", "u64", "a header with all that packets have in common"),
        Field("key", "u64", "of the op; none: packets carry the check"),
        Field("places", "u64", "u32[]: places of rows in their owner's list"),
        Field("groups", "u64", "u32[]: where a packet's values are in the columns below; none: at its own number"),
        Field("exponents", "u64", "s16[]"),
        Field("needs", "u64", "s16[]"),
        Field("scales", "u64", "f32[]"),
        Field("counts", "u64", "u16[]"),
        Field("weights", "u64", "u8[]"),
        Field("stride", "u32", "bytes of a packet"),
        Field("mark", "u32", "of the packet of a run that leaves last"),
    ),
)

RUN = Struct(
    "tb_run",
    "Packets with consecutive numbers for one owner.",
    (
        Field("first", "u32", "number of the first packet"),
        Field("count", "u32", "packets"),
        Field("last", "u32", "which of them leaves last and has the mark"),
        Field("seq", "u32", "row sequence of the owner's first place"),
        Field("owner", "u32", "header field"),
        Field("rows", "u32", "header field"),
    ),
)

PATH = Struct(
    "tb_path",
    "How fast a rank may be sent to (``transport.pace``), and round trips to it; times in ns.",
    (
        Field("rate", "f64", "bytes per second, where that is a limit"),
        Field("marked", "f64", "smoothed share of packets that came with CE"),
        Field("spent", "s64", "when what has left is paid for"),
        Field("sent", "s64", "when the last probe left; 0: none has"),
        Field("queued", "s64", "that it waits in own queues"),
        Field("before", "s64", "tb_peer_state.rtt_ns before it"),
        Field("raised", "s64", "when the rate was last set"),
        Field("bytes", "u64", "that have left since"),
        Field("packets", "u64", "that have left since"),
        Field("count", "u64", "packets that left between it and the one whose echo came last"),
        Field("rtt", "s64", "of the last echo, without what its probe waited in own queues"),
        Field("marks", "u32", "own packets that came there with CE, by the last echo"),
        Field("told", "u32", "1: an echo has come"),
        Field("awaited", "u32", "1: the echo of the last probe may still come"),
        Field("missed", "u32", "probes lost running"),
        Field("over", "u32", "round trips above the target running"),
        Field("slowed", "u32", "times that marks have lowered the rate"),
        Field("limited", "u32", "1: the rate is a limit"),
        Field("held", "u32", "1: something had to wait, and has not made up for it"),
    ),
)

LINK = Struct(
    "tb_link",
    "How fast all ranks together may be sent to (``transport.pace``); times in ns.",
    (
        Field("most", "f64", "bytes per second at most; 0: the link itself sees to it"),
        Field("speed", "f64", "bytes per second by which own queues empty; no rate is higher"),
        Field(
            "floor", "f64", "bytes per second; no rate is below half of an equal share of it, or of the speed if less"
        ),
        Field("gap", "s64", "from one burst to the next; 0: none"),
        Field("quantum", "s64", "of sending that may leave for a rank at once"),
        Field("ahead", "s64", "of sending that may lie in own queues"),
        Field("late", "s64", "the same where rows had to wait"),
        Field("room", "s64", "bytes that may wait in own queues"),
        Field("known", "f64", "bytes per second of the link; 0: no rank knows"),
        Field("own", "f64", "the same, as its driver says, right or wrong; 0: it does not"),
        Field("drained", "f64", "the same, as it was while sockets were full, lately; 0: none was"),
        Field("opens", "s64", "when the next burst may leave"),
        Field("leaves", "s64", "when the last of what was handed over leaves this host"),
        Field("spent", "s64", "as in tb_path"),
        Field("held", "u32", "as in tb_path"),
        Field("peers", "u32", "ranks that share it, at least 1"),
    ),
)

#: Of a sender at most: channels that stand for many ranks; sockets and channels.
SHARED_MOST, SOCKETS_MOST, CHANNELS_MOST = 2, 64, 32

TARGET = Struct(
    "tb_target",
    "A rank, or a shared channel, and what has become of packets for it.",
    (
        Field("name", "u64", "struct sockaddr_in or sockaddr_in6", 4),
        Field("ranks", "u64", "bitmap of who gets what is sent to it", MAX_RANKS // 64),
        Field("channel", "u32", "that its bursts leave over"),
        Field("cost", "u32", "bursts that this host is busy with for one"),
        Field("plain", "u32", "1: GSO does not work, packets leave one by one"),
        Field("pad", "u32", "0"),
        Field("packets", "u64", "that have left"),
        Field("bytes", "u64", "that have left"),
        Field("bursts", "u64", "that have left"),
        Field("lost", "u64", "packets given up"),
        Field("waits", "u64", "times a socket was full"),
    ),
)

#: Refused messages of which is kept why.
REFUSED_MOST = 64

SENDING = Struct(
    "tb_sending",
    "What a send queue and Python tell each other; times in ns.",
    (
        Field("now", "s64", "of the pump"),
        Field("again", "s64", "when to pump again; 0: nothing waits, or for a writable socket"),
        Field("peers", "u64", "bitmap of all ranks that are sent to", MAX_RANKS // 64),
        Field("voice", "u64", "struct tb_voice; 0: nothing is known of ranks, and none is probed or told"),
        Field("probes", "u64", "that have left"),
        Field("echoes", "u64", "that have come"),
        Field("marked", "u64", "own packets that came with CE, by all echoes"),
        Field("left", "u64", "packets that wait"),
        Field("bytes", "u64", "that have left, copies included"),
        Field("full", "u64", "bitmap of sockets that had no room"),
        Field("blocked", "u64", "bitmap of sockets that are not tried again in this pump"),
        Field("waits", "u64", "times a socket or a device queue was full"),
        Field("sleep", "u64", "struct tb_sleep of the thread that pumps; 0: none"),
        Field("contributions", "u64", "packets of contributions that have left"),
        Field("results", "u64", "packets of results that have left"),
        Field("copies", "u64", "packets that have left again, by request"),
        Field("held", "u64", "times a rate kept something back"),
        Field("stale", "u64", "rows dropped because their time was up"),
        Field("messages", "u64", "struct mmsghdr[count], to be handed over"),
        Field("count", "u32", "messages"),
        Field("port", "u32", "socket that they leave over"),
        Field("refused", "u32", "messages that were refused since Python has looked, as many as are kept at most"),
        Field("pad", "u32", "0"),
        Field("to", "u32", "destination of each", REFUSED_MOST),
        Field("errors", "s32", "its errno; below 0: that of a burst, which leaves in single packets", REFUSED_MOST),
        Field("sockets", "u32", "how many"),
        Field("channels", "u32", "how many"),
        Field("fds", "s32", "of sockets", SOCKETS_MOST),
        Field("rooms", "u64", "bytes that may wait in each", SOCKETS_MOST),
        Field("first", "u32", "first socket of a channel", CHANNELS_MOST),
        Field("ports", "u32", "sockets of a channel, which take turns", CHANNELS_MOST),
        Field("turn", "u32", "whose turn it is", CHANNELS_MOST),
        Field("due", "u32", "probes that wait for room"),
        Field("words", "u32", "single packets that wait"),
        Field("ways", "u32", "how often a round trip waits in own queues"),
        Field("ranks", "u32", "destinations below it are ranks, others shared channels"),
    ),
)


GIVEN = Struct(
    "tb_given",
    "Results of own rows that have been handed out, and can be sent again.",
    (
        Field("after", "u64", "struct tb_given: those of the op before, which is over; 0: none are kept"),
        Field("packets", "u64", "u8[rows, stride], headers finished"),
        Field("states", "u64", "u64[rows, 4]: partial checks of payloads"),
        Field("usable", "u64", "u8[rows]: the row exists"),
        Field("heads", "u64", "struct tb_stamp: of their headers"),
        Field("key", "u64", "of the op; 0: packets carry checks"),
        Field("label", "u32", "of the op"),
        Field("layout", "u32", "layout tag"),
        Field("rows", "u32", "how many"),
        Field("stride", "u32", "bytes of a packet"),
    ),
)

ANSWERS = Struct(
    "tb_answers",
    "What requests to a peer have taught (`collective.terms`); times in ns.",
    (
        Field("floor", "s64", "the shortest deadline"),
        Field("guess", "s64", "the probe timeout until an answer comes; 0: one has"),
        Field("window", "s64", "the reordering window"),
        Field("twice", "s64", "rows that ever came a second time by a request"),
        Field("usual", "f64", "time of an answer"),
        Field("varies", "f64", "its variance"),
    ),
)

AWAITED = Struct(
    "tb_awaited",
    "A row that is to come, in the order of sending; times in ns.",
    (
        Field("first", "s64", "when it was requested first; 0: never"),
        Field("asked", "s64", "when it was requested last"),
        Field("place", "u32", "among retransmissions, behind all rows that left once; 0: it was not requested"),
        Field("out", "u8", "requested, and not here"),
        Field("here", "u8", "it has arrived"),
        Field("gone", "u8", "its sender has none"),
        Field("lost", "u8", "to be requested now"),
    ),
)

INCOMING = Struct(
    "tb_incoming",
    "A flow as its receiver sees it; times in ns. Places are those among rows that left once [0], and among all [1].",
    (
        Field("row", "u64", "struct tb_awaited[rows]"),
        Field("listed", "u64", "s32[rows], of results: rows of the op in list order"),
        Field("due", "s64", "when to look next"),
        Field("mark", "s64", "when to ask its sender for the mark"),
        Field("ended", "s64", "when the mark was noticed; 0: it was not"),
        Field("noted", "s64", "when highest was seen; 0: all of it counts as passed"),
        Field("since", "s64", "the last progress of requested rows"),
        Field("moved", "s64", "when the last row came"),
        Field("waited", "s64", "the same, or when its sender was to be asked"),
        Field("called", "s64", "when its sender was asked last since a deadline was near"),
        Field("passed", "s32", "places that count as passed", 2),
        Field("highest", "s32", "places that will after the window", 2),
        Field("rank", "u32", "its sender"),
        Field("rows", "u32", "0: a switch has them all, and marks alone are asked for"),
        Field("first", "u32", "place in the list that it begins with; it wraps there"),
        Field("next", "u32", "place of the next retransmission"),
        Field("came", "u32", "rows here, as far as silence goes"),
        Field("expired", "u32", "probe timeouts since the last progress"),
        Field("questions", "u32", "since the last row"),
        Field("requests", "u32", "rows to be requested now"),
        Field("again", "u32", "rows that were requested, each once"),
        Field("mended", "u32", "of these, how many have come"),
        Field("known", "u8", "it was looked at"),
        Field("awaited", "u8", "by the caller's last word; a suspect may come back"),
        Field("finished", "u8", "its sender's mark says that all rows have left"),
        Field("over", "u8", "nothing more is requested"),
        Field("probed", "u8", "a probe timeout has expired"),
        Field("silent", "u8", "its mark is missed"),
        Field("asked", "u8", "its sender is to be asked for the mark now"),
        Field("released", "u8", "a switch is asked to release rows, and not only for lost ones"),
    ),
)

HALF = Struct(
    "tb_half",
    "One half of an op: its deadline, its silence and loss detection of its flows; times in ns.",
    (
        Field("deadline", "s64", "when it ends the half, as far as is known; 0: the clock has not started"),
        Field("promised", "s64", "the same before it was ever moved on"),
        Field("lasts", "s64", "from the start of the clock to promised"),
        Field("limit", "s64", "when it ends the half whatever comes"),
        Field("over", "s64", "when it ended the half, but for rows that can still be had; 0: it has not"),
        Field("tenth", "s64", "by how much it moves on"),
        Field("progress", "s64", "rows at the last look in the last tenth, plus one; 0: there was none"),
        Field("quiet", "s64", "since when all have finished and nothing has come; 0: they have not"),
        Field("quiet_at", "s64", "rows that had come by then"),
        Field("flows", "u64", "struct tb_incoming[count], of the rank after the own one first; 0: none has begun"),
        Field("terms", "u64", "struct tb_terms"),
        Field("own_op", "u64", "struct tb_own_op: whose half it is"),
        Field("patience", "s64", "that an ended flow is waited for while no requested row comes; 0: none is requested"),
        Field("step", "s64", "between two looks at a flow that runs"),
        Field("look", "s64", "between two looks at a flow with requested rows"),
        Field("due", "s64", "when to look again"),
        Field("count", "u32", "flows, some of which may not have begun"),
        Field("rounds", "u32", "how often senders were asked for their marks"),
        Field("closed", "u32", "flows that have ended and are over"),
        Field("requested", "u32", "requests for rows"),
        Field("part", "u32", "of places, modulo parts, whose rows this rank asks a switch to release first"),
        Field("parts", "u32", "live ranks"),
        Field("phase", "u8", "how far it is"),
        Field("why", "u8", "what has ended it"),
        Field("late", "u8", "1: the launch came after the deadline, and no row is waited for before it is requested"),
        Field("open", "u8", "1: a flow has ended, and its missing rows may still come"),
        Field("release", "u8", "1: a switch is to release rows with what is in"),
        Field("results", "u8", "1: it is the second"),
        Field("short_of", "u8", "1: a rank is known to bring a switch no rows"),
        Field("pad", "u8", "0"),
    ),
)

#: Answers and ops of which the slowest counts.
KEPT_ANSWERS = 64

OVERTIME = Struct(
    "tb_overtime",
    "What waiting past deadlines may cost, and how long ranks that live say nothing (`collective.terms`); in ns.",
    (
        Field("floor", "s64", "the shortest deadline"),
        Field("most", "s64", "that is saved up at most"),
        Field("reserve", "s64", "what rows that are asked for again leave of the balance"),
        Field("saved", "f64", "the balance"),
        Field("at", "s64", "when it was that"),
        Field("until", "s64", "waits until then are paid for"),
        Field("waited", "s64", "that ops have waited past their deadlines in all"),
        Field("answer", "s64", "that the slowest of the last answers took"),
        Field("lack", "s64", "that the own thread waited for a core between two turns of one of the last ops at most"),
        Field("lacked", "s64", "that it has waited for one in all, as the kernel counts it"),
        Field("share", "f64", "part of the time that is saved up"),
        Field("longest", "s64", "that answers and waits count at most"),
        Field("latest", "s64", "the longest wait for a core since the last op"),
        Field("answers", "s64", "what the last answers took, in turn", KEPT_ANSWERS),
        Field("answered", "u32", "how many there were"),
        Field("pad", "u32", "0"),
    ),
)

TERMS = Struct(
    "tb_terms",
    "What the ops of a rank are decided by, and what Python and the library tell each other in a turn; times in ns.",
    (
        Field("control", "u64", "struct tb_control"),
        Field("states", "u64", "struct tb_peer_state[], by rank"),
        Field("ops", "u64", "struct tb_op[]"),
        Field("slots", "u64", "struct tb_slot[]"),
        Field("presence", "u64", "struct tb_presence[]"),
        Field("results", "u64", "struct tb_result[]"),
        Field("given", "u64", "struct tb_given: results of the newest op that is over; 0: none are kept"),
        Field("answers", "u64", "struct tb_answers[], by half and rank"),
        Field("overtime", "u64", "struct tb_overtime"),
        Field("spoke", "u64", "s64[], by rank: when a word of it was read last; 0: never"),
        Field("asked", "u64", "s64[], by rank: when it was first asked what it has not answered yet; 0: it was not"),
        Field("live", "u64", "bitmap of ranks whose contributions are waited for", MAX_RANKS // 64),
        Field("owners", "u64", "bitmap of ranks whose results are waited for", MAX_RANKS // 64),
        Field("gone", "u64", "bitmap of ranks that have said goodbye", MAX_RANKS // 64),
        Field("voters", "u64", "bitmap of ranks of which a majority is a quorum", MAX_RANKS // 64),
        Field("live_since", "s64", "when the live set last changed"),
        Field("silence", "s64", "q of clock-10"),
        Field("start_max", "s64", "D_start of clock-3"),
        Field("stage_max", "s64", "of a half, in which deadlines move on"),
        Field("insist", "s64", "that results are asked for past a deadline"),
        Field("floor", "s64", "the shortest deadline"),
        Field("deadline_1", "s64", "the own D1 as configured; 0: it is learned"),
        Field("advertised", "s64", "the own D1 of the largest ops, as headers carry it"),
        Field("due", "s64", "when to look at ops again, for ones that were looked at; 0: when something arrives"),
        Field("listen", "s64", "when to look at flows again; 0: none is to be looked at"),
        Field("first", "u64", "struct tb_own_op: the oldest op in flight"),
        Field("handed", "u64", "struct tb_own_op: the newest that was launched and is not taken; 0: none"),
        Field("at", "u64", "the op that a turn has come to"),
        Field("cookie", "u32", "job"),
        Field("rank", "u32", "own rank"),
        Field("ranks", "u32", "that contribute"),
        Field("world", "u32", "ranks, a switch included"),
        Field("sum_mask", "u32", "slots less one"),
        Field("result_mask", "u32", "result rows less one"),
        Field("self_late", "u32", "1: the own rows are not waited for (clock-8)"),
        Field("suspects", "u32", "1: there are some"),
        Field("holds", "u32", "1: a live rank holds, so that no clock starts"),
        Field("everything", "u32", "1: the flows of all ops are to be looked at"),
        Field("entered", "u32", "1: the turn is in the midst of an op"),
        Field("label", "u32", "of the op that something was found of"),
        Field("alone", "u32", "1: the library looks at a single op, from which Python learns later"),
        Field("pad", "u32", "0"),
    ),
)

BOOKS = Struct(
    "tb_books",
    "Rows of one peer in one half of the ops so far.",
    (
        Field("ops", "s64", "that are over"),
        Field("expected", "s64", "rows"),
        Field("taken", "s64", "rows"),
        Field("repaired", "s64", "of these, rows that had been asked for again"),
        Field("gaps", "s64", "missing rows of ops whose mark said that all were sent"),
        Field("open", "s64", "missing rows of other ops"),
        Field("short_ops", "s64", "running, of which it has sent all and less than half came before requests"),
    ),
)

TALLY = Struct(
    "tb_tally",
    "What one half of an op came to, of others.",
    (
        Field("due", "s64", "rows"),
        Field("came", "s64", "rows"),
        Field("judged", "s64", "rows due of ranks of which some came, or that are waited for and have sent all"),
        Field("judged_came", "s64", "rows"),
        Field("absent", "u64", "bitmap of ranks of which none came", MAX_RANKS // 64),
        Field("lacking", "u64", "bitmap of ranks that are to be told that their rows do not come", MAX_RANKS // 64),
        Field("flags", "u32", "Flag bits of the results that are here"),
        Field("owners", "u32", "of which results are here"),
        Field("well", "u32", "of these, how many had a quorum"),
        Field("quorum", "u32", "1: a majority had part in the half"),
    ),
)

OWN_MARKS = Struct(
    "tb_own_marks",
    "Own marks: the highest op whose contributions (results) have been sent in full.",
    (
        Field("contributed", "u32", "of contributions"),
        Field("published", "u32", "of results"),
        Field("told", "u32", "the highest ``published`` that packets say which have left or wait in the queue"),
        Field("pad", "u32", "0"),
    ),
)

#: Others wait for answers while ops are moved on: after so many ns they are looked after in between. To ask the socket
#: after every small op would be a system call for nothing.
SERVE_AFTER = 1_000_000
#: Of so many ops a rank remembers what it said of its gradient.
SAID_MOST = 256

VOICE = Struct(
    "tb_voice",
    "What a rank says in control packets, and by what (`collective.speaker`).",
    (
        Field("terms", "u64", "struct tb_terms"),
        Field("line", "u64", "struct tb_line"),
        Field("head", "u64", "a header with all that packets have in common"),
        Field("marks", "u64", "struct tb_own_marks"),
        Field("key", "u64", "of the present epoch; 0: packets carry checks"),
        Field("stamp", "u64", "the newest of a control packet, in a job with a key (auth-5)"),
        Field("repair_asked", "u64", "packets that asked for rows, each once"),
        Field("asked", "u64", "questions for marks, each once"),
        Field("rows_sent_again", "u64", "rows that a switch was asked for"),
        Field("rows_flushed", "u64", "rows that a switch was to release"),
        Field("repair_gone", "u64", "packets that said which rows do not exist"),
        Field("control_refused", "u64", "control packets that were damaged, or asked for nothing"),
        Field("control_replayed", "u64", "control packets that were sent again by others (auth-5)"),
        Field("requests", "u64", "struct tb_asked: what others have requested"),
        Field("again", "s64", "when to go on with answers, ns; 0: none is left"),
        Field("waiting", "u32", "requests"),
        Field("letters", "u32", "control packets that Python is to read"),
        Field("source", "u64", "struct tb_source: where control packets come from"),
        Field("controls", "s32", "an eventfd that says so, for the library's tables; -1: none"),
        Field("said_of", "u32", "ops of which something was said of the own gradient", SAID_MOST),
        Field("said", "u32", "what: Flag bits", SAID_MOST),
        Field("saying", "u32", "how many such ops there were"),
        Field("width", "u32", "bytes of a body at most"),
        Field("largest", "u32", "packets of the longest rows in a burst"),
    ),
)

OWNER = Struct(
    "tb_owner",
    "What a rank sends its rows by, and makes, sends and reads results (`collective.job`).",
    (
        Field("terms", "u64", "struct tb_terms"),
        Field("source", "u64", "struct tb_source: seals rows"),
        Field("line", "u64", "struct tb_line"),
        Field("marks", "u64", "struct tb_own_marks"),
        Field("books", "u64", "struct tb_books[], of contributions, then of results, by rank"),
        Field("stop", "f64", "part of an op's contributions beyond which training ends if it is lost"),
        Field("skip", "f64", "beyond which no rank applies the op"),
        Field("code", "u64", "the compiled pass that makes results (``wire.jit.entry``)"),
        Field("memory", "u64", "words of what it works in"),
        Field("voice", "u64", "struct tb_voice"),
        Field("expected", "u64", "struct tb_expect_results[], by slot of ops"),
        Field("most", "u32", "rows that the thread makes in one go"),
        Field("form", "u32", "Flag bits of a switch's results; 0: there is none"),
    ),
)

OWN_OP = Struct(
    "tb_own_op",
    "An op of a rank from its first sign of life on (`collective.op`); times in ns.",
    (
        Field("after", "u64", "the next op in flight"),
        Field("halves", "u64", "struct tb_half: of contributions to the own rows, and of results", 2),
        Field("shares", "u64", "s64[], by rank: rows that it owns"),
        Field("starts", "u64", "s64[], by rank: where its rows begin in row_at"),
        Field("row_at", "u64", "s32[rows]: the rows in packet order"),
        Field("owner", "u64", "u8[rows]: whose they are"),
        Field("places", "u64", "s64[], by rank: the place in the own list with which it begins"),
        Field("usable", "u64", "u8[own]: a rank contributed to the own row"),
        Field("own_scale", "u64", "f32[own]: of the own results"),
        Field("source", "u64", "s64[rows]: in the result ring, -2 - place in the own results, or -1: not here"),
        Field("row_scale", "u64", "f32[rows]: of results"),
        Field("row_exponent", "u64", "s16[rows]: next exponents that a switch says"),
        Field("row_count", "u64", "u16[rows]: contributors that a switch says"),
        Field("handed", "u64", "struct tb_own_op: the one that was launched before it, and is not taken either"),
        Field("heads", "u64", "struct tb_stamp: of headers of contributions"),
        Field("seqs", "u64", "u32[], by rank: row sequences of the first rows that it owns"),
        Field("code", "u64", "struct tb_work: the pass that codes the own rows; 0: Python codes them"),
        Field("given", "u64", "u8[rows, stride]: contributions by owner, headers finished; 0: none are given"),
        Field("states", "u64", "u64[rows, 4]: partial checks of their payloads"),
        Field("firsts", "u64", "s64[], by owner: the place of the packet that is first in memory"),
        Field("tag_key", "u64", "of the op; 0: packets carry checks"),
        Field("made", "u64", "struct tb_given: where the results of the own rows are made"),
        Field("mean", "u64", "words of the pass that makes them; 0: not known yet"),
        Field("came", "u64", "s64[], by rank: own rows with a contribution at the end; results here", 2),
        Field("tally", "u64", "struct tb_tally: of these", 2),
        Field("decode", "u64", "struct tb_work: the pass that decodes the results; 0: Python decodes them"),
        Field("worth", "s64", "how long results of its size are worth sending"),
        Field("closed_at", "s64", "when the own rows were sealed, or a switch first asked to release some; 0: never"),
        Field("came_by", "s64", "results that had come when a switch was first asked to release rows"),
        Field("sent_at", "s64", "when the own rows had left; 0: they have not"),
        Field("published_at", "s64", "when their results had left; 0: they have not"),
        Field(
            "results",
            "u64",
            "struct tb_given: of the own rows, handed out; 0: not, or kept with others",
        ),
        Field("stage_one", "s64", "the own D1 of its size; 0: it owns no rows of such ops"),
        Field("usual", "s64", "D2 of its size: what the second half takes as a rule"),
        Field("admitted", "s64", "when the own launch found room; the clocks count from here"),
        Field("start", "s64", "c of clock-3, when its clock started; 0: it has not"),
        Field("held", "s64", "when a live rank was last seen to hold: no clock starts before"),
        Field("coding", "s64", "when the own rows were begun to be coded; 0: they were not"),
        Field("own_in", "s64", "when the own rows came into the own sums; 0: they are not there"),
        Field("collected_at", "s64", "when the second half was closed; 0: it is open"),
        Field("listen", "s64", "when to look at its flows"),
        Field("due", "s64", "when to look again, as found in this look; 0: when something arrives"),
        Field("abstained", "u64", "bitmap of ranks that have said that they bring no rows", MAX_RANKS // 64),
        Field("stayed", "u64", "bitmap of ranks that have said that they come too late to bring any", MAX_RANKS // 64),
        Field("marks", "u64", "bitmaps of ranks whose marks covered it in the last turn", 2 * MAX_RANKS // 64),
        Field("label", "u32", "of the op"),
        Field("slot", "u32", "of its record"),
        Field("layout", "u32", "layout tag"),
        Field("rows", "u32", "of all owners"),
        Field("own", "u32", "rows that this rank owns"),
        Field("stride", "u32", "bytes of a packet of contributions"),
        Field("sum_seq", "u32", "of the first own row"),
        Field("result_seq", "u32", "of the first row"),
        Field("previous", "u32", "the op before"),
        Field("map_id", "u32", "of the owner map that it is placed by"),
        Field("form", "u32", "Flag bits of contributions"),
        Field("burst", "u32", "contributions of a burst at most"),
        Field("say", "u32", "Flag bits of the own results"),
        Field("largest", "u32", "results of a burst at most"),
        Field("missing", "u32", "own rows without a contributor"),
        Field("present", "u32", "results of others that were here at the end"),
        Field("overwritten", "u32", "of these, how many were another op's before they were read"),
        Field("aims", "u32", "destinations of the results"),
        Field("aim", "u16", "each of them", MAX_RANKS),
        Field("stirred", "u8", "1: something but the datapath has changed it"),
        Field("asked", "u8", "what Python has said of it in this look"),
        Field("sending", "u8", "how far this rank is with its own rows"),
        Field("switched", "u8", "1: a switch sums its rows"),
        Field("empty", "u8", "1: this rank brings no rows, by its choice or its gradient, or since they come too late"),
        Field("overtaken", "u8", "1: all others were through with it before this rank had sent rows"),
        Field("mismatched", "u8", "1: ranks disagree on its layout"),
        Field("left", "u8", "1: all own rows have left"),
        Field("unnoted", "u8", "1: its own rows are sealed, and Python has not learned from that"),
        Field("queued", "u8", "1: the results are in the send queue, or beyond"),
        Field("action", "u8", "what the safeguard calls for"),
        Field("own_present", "u8", "1: the own rows are in the own sums"),
        Field("known", "u8", "1: enough is known of its size (clock-26)"),
        Field("cold", "u8", "1: a switch's scales are still to be agreed on"),
        Field("nothing", "u8", "1: no rank brought rows, as all say"),
        Field("decoded", "u8", "1: the pass that decodes has ended, or there is none"),
    ),
)


class Sending(enum.IntEnum):
    """How far a rank is with its own contribution."""

    FORESEEN = 0  #: Others' packets have named the op, this rank has not launched it.
    LAUNCHED = 1  #: It has.
    AGREEING = 2  #: The op is cold: this rank has told its scales and waits for those of the others.
    CODING = 3  #: A device makes the codes.
    OVER = 4  #: The rows are in the send queue, or it is known that none will come.


class Phase(enum.IntEnum):
    """How far one half of an op is."""

    OPEN = 0  #: Rows are taken.
    CLOSED = 1  #: Nothing more is taken: the first half is sealed, or the second decoded.
    DONE = 2  #: And passed on: the results have left, or the caller has the gradient.


class Why(enum.IntEnum):
    """The reason why a half has ended."""

    NOTHING = 0  #: It goes on.
    COMPLETE = 1  #: All rows are in.
    QUIET = 2  #: All have finished, and nothing more came.
    DEADLINE = 3  #: The time was over.


class Action(enum.IntEnum):
    """What a limit on loss calls for (``transport.config``); the larger wins."""

    NONE = 0  #: Nothing.
    SKIP = 1  #: No rank applies the op.
    STOP = 2  #: Training ends.


class Found(enum.IntEnum):
    """The next thing to be done for an op."""

    NOTHING = 0  #: Nothing: no op is left.
    MISMATCH = 1  #: Ranks disagree on its layout.
    SEND = 2  #: See how far the own rows are.
    SEAL = 3  #: Close the first half: average what came, and publish it.
    FINISH = 4  #: Close the second half: decode the result.


class Sent(enum.IntEnum):
    """What a send queue wants of Python."""

    DONE = 0  #: Nothing: the pump is over.
    CALL = 1  #: Hand over messages, and say what became of them.
    PROBE = 2  #: The same, once they have their time: they are probes.


class Ready(enum.IntEnum):
    """What the transport thread waits for, sockets apart: bits of ``tb_sleep.ready``, in the order of descriptors."""

    HANDED = 1  #: Other threads have handed something over.
    EVENTS = 2  #: The datapath says what has begun or is complete.
    CONTROLS = 4  #: There are control packets.


#: Descriptors in front of sockets.
SOCKETS_AT = len(Ready)


class Woken(enum.IntEnum):
    """What only Python can do after a wake-up."""

    TURN = 1  #: A turn is due.
    SERVE = 2  #: Read what others say that the library leaves to Python.
    SEND = 8  #: Pump: not all sockets are the system's.


#: Written to the first of ``Ready`` where a turn is due; less says that an op was handed over (``tb_hand``).
POKED = 1 << 32
#: Ops that begin elsewhere between two turns; an event is a hint, so that more are seen in the maps.
OPENED_MOST = 64

SOURCE = Struct(
    "tb_source",
    "Where a datapath's events and words come from, and who seals its slots: the library's tables, or a kernel's maps.",
    (
        Field("tables", "u64", "struct tb_tables; 0: a ring"),
        Field("consumed", "u64", "u64: how far the ring was read"),
        Field("produced", "u64", "u64: how far it was written"),
        Field("data", "u64", "of the ring, twice in a row"),
        Field("mask", "u64", "bytes of it less one"),
        Field("keys", "u64", "u32[rows]: 0, 1, ..., to seal by"),
        Field("values", "u64", "u32[rows, 2]: lock and sealed op"),
        Field("rows", "u32", "slots of sums"),
        Field("locks", "s32", "descriptor of the map of their locks"),
        Field("peers", "u64", "struct tb_peer[]: who may send control packets"),
        Field("strange", "u64", "control packets of others"),
        Field("socket", "s32", "that control packets come in by"),
        Field("pad", "u32", "0"),
    ),
)

SLEEP = Struct(
    "tb_sleep",
    "How the transport thread sleeps, and looks out meanwhile (`collective.waiter`); times in ns.",
    (
        Field("polled", "u64", "struct pollfd[]: as in ``Ready``, and sockets behind"),
        Field("terms", "u64", "struct tb_terms"),
        Field("line", "u64", "struct tb_line"),
        Field("sending", "u64", "struct tb_sending of it"),
        Field("source", "u64", "struct tb_source"),
        Field("owner", "u64", "struct tb_owner"),
        Field("longest", "s64", "of a wait"),
        Field("stopped", "s64", "after which a thread that has not woken up was stopped"),
        Field("end", "s64", "when a turn is due at the latest"),
        Field("soon", "s64", "when to look at ops: by a clock, or after events that complete no half; 0: by those"),
        Field("awake", "s64", "when the thread was last seen to run; 0: never"),
        Field("served", "s64", "when others were last looked after in the midst of a turn"),
        Field("asked", "s64", "when the last wait was to end"),
        Field("woken", "s64", "when it did"),
        Field("ready", "u64", "``Ready``: what it found, with sockets behind"),
        Field("voice", "u64", "struct tb_voice"),
        Field("deputy", "u64", "struct tb_deputy; 0: there is none"),
        Field("opened", "u32", "ops that have begun elsewhere since the last turn", OPENED_MOST),
        Field("count", "u32", "of them"),
        Field("found", "u32", "what a turn is due by (``Found``); 0: anything else"),
        Field("label", "u32", "of the op of which it was found"),
        Field("fds", "u32", "descriptors"),
        Field("direct", "u32", "1: all sockets are the system's"),
        Field("schedstat", "s32", "what the kernel counts of the thread; 0 or less: nothing"),
        Field("unsent", "u32", "1: own rows are still to be coded, once Python has done what was found"),
        Field("due", "u32", "not 0: others have said something in the midst of a turn, by which another one is due"),
    ),
)

WORK = Struct(
    "tb_work",
    "A compiled pass over many groups, which threads share piece by piece (`codec.threads`).",
    (
        Field("code", "u64", "where it begins (`wire.jit.entry`)"),
        Field("call", "s64", "where the words are that it is called with"),
        Field("next", "s64", "the first that no thread has taken"),
        Field("end", "s64", "behind the last"),
        Field("piece", "s64", "taken at once"),
        Field("sum", "s64", "of what it returned"),
        Field("crew", "u64", "struct tb_crew: threads that share it"),
        Field("members", "u32", "how many of them do"),
        Field("failed", "u32", "1: it returned less than 0, and ends"),
    ),
)

#: Of the library (``host_lib/core``) and its callers.
RECORDS = (
    STAMP, RUN, PATH, LINK, TARGET, SENDING, GIVEN, ANSWERS, AWAITED, INCOMING, HALF, OVERTIME, TERMS, BOOKS,
    TALLY, OWN_MARKS, OWN_OP, VOICE, OWNER, SOURCE, SLEEP, WORK,
)  # fmt: skip

#: Maps of the worker program, in order of creation.
WORKER_MAPS: tuple[Map, ...] = (
    Map("control", "contexts", "tb_control", (CONTEXTS,), "both"),
    Map("peers", "registered ranks", "tb_peer", (MAX_RANKS,), "host"),
    Map("expect_results", "expected result rows of ops", "tb_expect_results", (OP_RING,), "host"),
    Map("slots", "records of sum slots", "tb_slot", ("sum_rows",), "program"),
    Map("sums", "u16 lanes of sum slots", "u8", ("sum_rows",), "program", width=(2, "width")),
    Map("results", "codes of result rows", "u8", ("result_rows",), "program", width=("width",)),
    Map("result_records", "records of result rows", "tb_result", ("result_rows",), "program"),
    Map("presence", "which results are whole", "tb_presence", ("result_rows",), "program"),
    Map("ops", "records of ops", "tb_op", (OP_RING,), "program"),
    Map("arrivals", "arrival times by op and rank", "tb_arrival", (OP_RING, MAX_RANKS), "program"),
    Map("peer_states", "marks of ranks", "tb_peer_state", (MAX_RANKS,), "both"),
    Map("ledger", "row cpu * (MAX_RANKS + 1) + sender: counters", "tb_ledger", ("cpus", MAX_RANKS + 1), "program"),
    Map("keys", "of even and odd epochs", "u8", (KEY_EPOCHS,), "host", mmap=False, width=("key_bytes",), secret=True),
    Map("slot_locks", "locks and seals of sum slots", "tb_slot_lock", ("sum_rows",), "both", mmap=False),
    Map("result_locks", "locks of result rows", "tb_lock", ("result_rows",), "program", mmap=False),
    Map("op_locks", "locks of op records", "tb_lock", (OP_RING,), "program", mmap=False),
    Map("peer_locks", "locks of peer states", "tb_lock", (MAX_RANKS,), "program", mmap=False),
    # the event ring is the one map that is no array; the loader creates it by name: "events", EVENT_RING_BYTES
)

#: Maps of the faults program.
FAULT_MAPS: tuple[Map, ...] = (
    Map("faults", "settings and state", "tb_faults", (1,), "both", mmap=False),
    Map("fault_counts", "counters", "tb_fault_counts", ("cpus",), "program"),
)

#: Maps of the fan-out program.
FANOUT_MAPS: tuple[Map, ...] = (
    Map("fanout", "settings", "tb_fanout", (1,), "host"),
    Map("fanout_peers", "where copies go, by rank", "tb_fanout_peer", (MAX_RANKS,), "both"),
    Map("fanout_counts", "row cpu * MAX_RANKS + rank: counters", "tb_fanout_counts", ("cpus", MAX_RANKS), "program"),
)

#: Maps of the switch; ``ports`` is a power of two.
SWITCH_MAPS: tuple[Map, ...] = (
    Map("switch_directory", "jobs by address, port and cookie", "tb_switch_directory", (1,), "host"),
    Map("switch_jobs", "jobs", "tb_switch_job", (SWITCH_JOBS,), "host"),
    Map("switch_ranks", "row job * MAX_RANKS + rank", "tb_switch_rank", (SWITCH_JOBS, MAX_RANKS), "host"),
    Map("switch_out", "row job * ports + ifindex mod ports", "tb_switch_rank", (SWITCH_JOBS, "ports"), "host"),
    Map("switch_slots", "records of slots", "tb_switch_slot", ("slots",), "program"),
    Map("switch_sums", "u16 lanes of slots; once final, the mean", "u8", ("slots",), "program", width=(2, "width")),
    Map("switch_ports", "row cpu * ports + ifindex mod ports", "tb_switch_port", ("cpus", "ports"), "program"),
    Map(
        "switch_ledger",
        "row (cpu * SWITCH_JOBS + job) * (MAX_RANKS + 1) + sender",
        "tb_ledger",
        ("cpus", SWITCH_JOBS, MAX_RANKS + 1),
        "program",
    ),
    Map("switch_locks", "locks of slots", "tb_lock", ("slots",), "program", mmap=False),
    # the device maps of the jobs lie in one more map, by job: "switch_devices"
)


def op_label(step: int, index: int) -> int:
    """The op label of ``index`` in ``step`` (wraps at 2**32).

    Raises:
        ValueError: ``index`` does not fit.
    """
    if not 0 <= index < 1 << OP_INDEX_BITS:
        raise ValueError(f"op index {index} outside 0..{(1 << OP_INDEX_BITS) - 1}: use larger buckets")
    return (step << OP_INDEX_BITS | index) & 0xFFFFFFFF


def key_bytes(width: int) -> int:
    """Bytes of a key (``wire.tag``) for rows of ``width`` bytes."""
    return 8 * KEY_WORDS + width


def op_slot(op: int) -> int:
    """Position of an op's record in the op ring."""
    return (op >> OP_INDEX_BITS) % OP_STEPS * OP_PER_STEP + op % OP_PER_STEP  # that divides the number of indices


def serial_distance(a: int, b: int) -> int:
    """Signed distance ``a - b`` of two u32 serial numbers (RFC 1982 in spirit; exact for |d| < 2**31)."""
    return ((a - b + 0x80000000) & 0xFFFFFFFF) - 0x80000000

"""The wire format against bytes written down once, and the check against errors it must see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from golden import Golden, golden_packets
from reference_proof import check_packet, check_reference
from tailbound.wire import packets
from tailbound.wire.check import K1, K2, K3, K4, partial
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import HEADER_BYTES, PacketType

GOLDEN = golden_packets()
every = pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: g.name)


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).copy()


def test_golden_packets_cover_every_type() -> None:
    assert {g.fields["type"] for g in GOLDEN} == {int(t) for t in PacketType}
    assert len(GOLDEN) >= 12


@every
def test_numpy_reads_golden_packets(golden: Golden) -> None:
    head, body = packets.parse(golden.data)
    assert {n: head[n][0].item() for n in HEADER_DTYPE.names} == golden.fields
    assert body == golden.payload


@every
def test_numpy_writes_golden_packets(golden: Golden) -> None:
    fields = {n: v for n, v in golden.fields.items() if n != "check"}
    assert packets.packet(packets.header(**fields), golden.payload) == golden.data


@every
def test_the_check_of_golden_packets(golden: Golden) -> None:
    assert check_reference(golden.header, golden.payload) == golden.check
    assert int(check_packet(array(golden.data))) == golden.check


def test_the_check_by_hand() -> None:
    """One step of payload, written out: two words, then the header's seven."""
    header = bytes(56) + bytes(8)
    words = (3).to_bytes(8, "little") + (5).to_bytes(8, "little")
    # five additions on each lane: word 0 goes into a0 and five times into b0, word 1 likewise
    c = (3 * K1 + 5 * K2 + 15 * K3 + 25 * K4) % 2**64
    assert check_reference(header, words) == c ^ c >> 32


@given(st.binary(min_size=56, max_size=56), st.integers(0, 40), st.randoms(use_true_random=False))
def test_compiled_check_is_the_reference(head: bytes, steps: int, random: object) -> None:
    body = random.randbytes(16 * steps)
    assert int(check_packet(array(head + bytes(8) + body))) == check_reference(head + bytes(8), body)


def test_a_partial_state_can_be_continued() -> None:
    words = np.random.default_rng(1).integers(0, 1 << 63, 44, dtype=np.uint64)
    whole, halves = np.zeros(4, np.uint64), np.zeros(4, np.uint64)
    partial(words, whole)
    partial(words[:20], halves)
    partial(words[20:], halves)
    assert whole.tolist() == halves.tolist()


def test_every_single_bit_is_seen() -> None:
    data = GOLDEN[0].data
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        assert packets.parse(bytes(broken)) is None, f"bit {bit}"


@pytest.mark.parametrize("bit", [0, 7, 8, 31, 32, 56])
def test_a_stuck_bit_column_is_seen(bit: int) -> None:
    """The same bit turned in 2^k neighbouring words, which a plain sum misses at the upper end."""
    data = array(GOLDEN[3].data)
    for count in (2, 4, 8, 16, 32, 64, 128):
        broken = data.copy()
        broken[HEADER_BYTES:].view(np.uint64)[:count] ^= np.uint64(1) << np.uint64(bit)
        assert packets.parse(broken.tobytes()) is None, count


def test_the_known_blind_spot() -> None:
    """The upper bits of two words can cancel, since carries run upwards only: the price of a check without tables."""
    data = array(GOLDEN[3].data)
    data[HEADER_BYTES:].view(np.uint64)[[0, 4]] ^= np.uint64(1) << np.uint64(63)
    assert packets.parse(data.tobytes()) is not None


@given(st.integers(0, 87), st.integers(0, 87))
def test_exchanged_words_are_seen(i: int, j: int) -> None:
    data = array(GOLDEN[3].data)
    words = data[HEADER_BYTES:].view(np.uint64)
    if words[i] != words[j]:
        words[[i, j]] = words[[j, i]]
        assert packets.parse(data.tobytes()) is None


@given(st.integers(1, 88))
def test_cut_and_padded_packets_are_seen(steps: int) -> None:
    data = GOLDEN[3].data
    assert packets.parse(data[: len(data) - 16 * steps]) is None
    assert packets.parse(data + bytes(16 * steps)) is None

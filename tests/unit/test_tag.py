"""The tag against its definition, published vectors, and changes that it must see. Rule: auth-1."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cases
from reference_proof import siphash_reference, tag_reference
from tailbound.wire import packets
from tailbound.wire.proof import absorb, proof_of, proven
from tailbound.wire.schema import HEADER_BYTES, KEY_WORDS, Flag
from tailbound.wire.tag import NO_KEY, closed, key_of

#: Of the 64 that were published with SipHash: the key is 00 to 0f, the message 00, 01, 02, ...
VECTORS = {
    0: 0x726FDB47DD0E0E31,
    1: 0x74F839C593DC67FD,
    7: 0xAB0200F58B01D137,
    8: 0x93F5F5799A932462,
    15: 0xA129CA6149BE45E5,
    63: 0x958A324CEB064572,
}
K0, K1 = (int.from_bytes(bytes(range(at, at + 8)), "little") for at in (0, 8))
HEADS = st.binary(min_size=56, max_size=56)


def key(width: int = 256, epoch: int = 0) -> np.ndarray:
    return key_of(random.Random(epoch).randbytes(8 * (KEY_WORDS - 1) + width), epoch)


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(data), np.uint8)


@pytest.mark.parametrize("length", VECTORS)
def test_siphash_has_its_published_values(length: int) -> None:
    assert siphash_reference(K0, K1, bytes(range(length))) == VECTORS[length]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_compiled_siphash_is_the_reference(k0: int, k1: int, total: int, place: int) -> None:
    made = closed(np.uint64(total), np.uint64(place), np.array([k0, k1], np.uint64))
    assert int(made) == siphash_reference(k0, k1, place.to_bytes(8, "little") + total.to_bytes(8, "little"))


def test_a_tag_written_down() -> None:
    """Version 1 of the tag: never made anew."""
    head = packets.header(type=1, cookie=0x7A11B0DE, op=3073, seq=1005, row=5, rows=20, sender=1)
    words = np.arange(1, 8 * (KEY_WORDS - 1) + 33, dtype=np.uint8)
    data = packets.packet(head, bytes(range(32)), key_of(words.tobytes(), 1))
    assert int.from_bytes(data[2:4], "big") == Flag.EPOCH
    assert data[56:64].hex() == "cf605e9e0606d6bf"


@given(HEADS, st.integers(0, 16), st.integers(0, 1), st.randoms(use_true_random=False))
def test_compiled_tag_is_the_reference(head: bytes, steps: int, epoch: int, chance: object) -> None:
    data = array(head + bytes(8) + chance.randbytes(16 * steps))
    made = int(proof_of(data, key(epoch=epoch)))
    assert bool(int.from_bytes(data[2:4].tobytes(), "big") & Flag.EPOCH) == bool(epoch)
    assert made == tag_reference(data[:64].tobytes(), data[64:].tobytes(), key(epoch=epoch))


def test_one_word_by_hand() -> None:
    """With a key that is zero but for SipHash's words and one of the row."""
    words = np.zeros(KEY_WORDS + 2, np.uint64)
    words[:2], words[KEY_WORDS] = (K0, K1), 2**40
    # the length is 16, whose upper half is 0; word 0 of the row is 7
    x = 2**40 + 7
    total = (x * (x >> 32)) % 2**64
    expected = siphash_reference(K0, K1, bytes(8) + total.to_bytes(8, "little"))
    assert tag_reference(bytes(64), (7).to_bytes(8, "little") + bytes(8), words) == expected


def test_every_bit_and_every_length_is_under_the_tag() -> None:
    data, keys = cases.tagged(cases.contribution()), cases.KEYS
    assert packets.parse(data, keys) is not None
    for bit in range(8 * len(data)):
        assert packets.parse(cases.flipped(data, bit), keys) is None, bit
    for other in (data[:-16], data + bytes(16), data[:64]):
        assert packets.parse(other, keys) is None


def test_a_tag_is_worth_nothing_in_another_place_or_epoch() -> None:
    one, other = cases.tagged(cases.contribution(1)), cases.tagged(cases.contribution(2))
    assert packets.parse(one[:64] + other[64:], cases.KEYS) is None
    assert packets.parse(one[:56] + other[56:64] + one[64:], cases.KEYS) is None
    odd = bytearray(one)
    odd[2] |= Flag.EPOCH >> 8
    assert packets.parse(bytes(odd), cases.KEYS) is None
    assert packets.parse(one, cases.KEYS[::-1]) is None
    assert packets.parse(one) is None  # nor as a check
    assert packets.parse(cases.contribution(1), cases.KEYS) is None  # nor a check as a tag


def test_what_is_longer_than_the_key_is_refused() -> None:
    data = packets.packet(packets.header(type=3), bytes(512))
    assert packets.parse(data, cases.KEYS) is None
    with pytest.raises(ValueError, match="fit"):
        tag_reference(data[:HEADER_BYTES], data[HEADER_BYTES:], cases.KEYS[0])
    with pytest.raises(ValueError, match="multiple of 8"):
        key_of(bytes(79), 0)


def test_without_a_key_it_is_the_check() -> None:
    data = array(cases.contribution())
    state = np.zeros(4, np.uint64)
    absorb(data[64:].view(np.uint64), state, NO_KEY)
    made = proven(data[:64].view(np.uint64), state, NO_KEY)
    assert int(made) == int.from_bytes(data[56:64].tobytes(), "big") == int(proof_of(data, NO_KEY))

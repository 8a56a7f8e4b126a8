"""The wire format against bytes written down once, and the check and the tag (auth-1) against changes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cases
import packed
from golden import Golden, golden_packets
from packed import proof_of
from reference_proof import check_packet, check_reference, siphash_reference, tag_reference
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import HEADER_BYTES, KEY_WORDS, Flag, PacketType
from tailbound.wire.tag import key_of

GOLDEN = golden_packets()


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).copy()


def test_golden_packets_cover_every_type() -> None:
    assert {g.fields["type"] for g in GOLDEN} == {int(t) for t in PacketType}


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: g.name)
def test_golden_packets_are_read_written_and_checked(golden: Golden) -> None:
    head, body = packed.parse(golden.data)
    assert {n: head[n][0].item() for n in HEADER_DTYPE.names} == golden.fields
    assert body == golden.payload
    fields = {n: v for n, v in golden.fields.items() if n != "check"}
    assert packed.packet(packed.header(**fields), golden.payload) == golden.data
    assert check_reference(golden.header, golden.payload) == golden.check == int(check_packet(array(golden.data)))


HEADS = st.binary(min_size=56, max_size=56)


@given(HEADS, st.integers(0, 40), st.randoms(use_true_random=False))
def test_compiled_check_is_the_reference(head: bytes, steps: int, random: object) -> None:
    body = random.randbytes(16 * steps)
    assert int(check_packet(array(head + bytes(8) + body))) == check_reference(head + bytes(8), body)


@given(st.integers(0, 87), st.integers(0, 87), st.integers(1, 88))
def test_exchanged_words_and_cut_and_padded_packets_are_seen(i: int, j: int, steps: int) -> None:
    data = array(GOLDEN[3].data)
    words = data[HEADER_BYTES:].view(np.uint64)
    assert packed.parse(data[: len(data) - 16 * steps].tobytes()) is None
    assert packed.parse(data.tobytes() + bytes(16 * steps)) is None
    if words[i] != words[j]:
        words[[i, j]] = words[[j, i]]
        assert packed.parse(data.tobytes()) is None


#: Of the 64 that were published with SipHash: the key is 00 to 0f, the message 00, 01, 02, ...
VECTORS = {0: 0x726FDB47DD0E0E31, 1: 0x74F839C593DC67FD, 7: 0xAB0200F58B01D137, 8: 0x93F5F5799A932462,
           15: 0xA129CA6149BE45E5, 63: 0x958A324CEB064572}  # fmt: skip
K0, K1 = (int.from_bytes(bytes(range(at, at + 8)), "little") for at in (0, 8))


def key(width: int = 256, epoch: int = 0) -> np.ndarray:
    return key_of(random.Random(epoch).randbytes(8 * (KEY_WORDS - 1) + width), epoch)


@pytest.mark.parametrize("length", VECTORS)
def test_siphash_has_its_published_values(length: int) -> None:
    assert siphash_reference(K0, K1, bytes(range(length))) == VECTORS[length]


def test_a_tag_written_down() -> None:
    """Version 1 of the tag: never made anew."""
    head = packed.header(type=1, cookie=0x7A11B0DE, op=3073, seq=1005, row=5, rows=20, sender=1)
    words = np.arange(1, 8 * (KEY_WORDS - 1) + 33, dtype=np.uint8)
    data = packed.packet(head, bytes(range(32)), key_of(words.tobytes(), 1))
    assert int.from_bytes(data[2:4], "big") == Flag.EPOCH
    assert data[56:64].hex() == "cf605e9e0606d6bf"


@given(HEADS, st.integers(0, 16), st.integers(0, 1), st.randoms(use_true_random=False))
def test_compiled_tag_is_the_reference(head: bytes, steps: int, epoch: int, chance: object) -> None:
    data = array(head + bytes(8) + chance.randbytes(16 * steps))
    made = int(proof_of(data, key(epoch=epoch)))
    assert bool(int.from_bytes(data[2:4].tobytes(), "big") & Flag.EPOCH) == bool(epoch)
    assert made == tag_reference(data[:64].tobytes(), data[64:].tobytes(), key(epoch=epoch))


@pytest.mark.parametrize(("data", "keys"), [(GOLDEN[0].data, None), (cases.tagged(cases.contribution()), cases.KEYS)])
def test_every_bit_and_every_length_is_under_the_check_or_tag(data: bytes, keys: Any) -> None:
    assert packed.parse(data, keys) is not None
    for bit in range(8 * len(data)):
        assert packed.parse(cases.flipped(data, bit), keys) is None, bit
    for other in (data[:-16], data + bytes(16), data[:64]):
        assert packed.parse(other, keys) is None


def test_a_tag_is_worth_nothing_in_another_place_or_epoch() -> None:
    one, other = cases.tagged(cases.contribution(1)), cases.tagged(cases.contribution(2))
    assert packed.parse(one[:64] + other[64:], cases.KEYS) is None
    assert packed.parse(one[:56] + other[56:64] + one[64:], cases.KEYS) is None
    odd = bytearray(one)
    odd[2] |= Flag.EPOCH >> 8
    assert packed.parse(bytes(odd), cases.KEYS) is None
    assert packed.parse(one, cases.KEYS[::-1]) is None
    assert packed.parse(one) is None  # nor as a check
    assert packed.parse(cases.contribution(1), cases.KEYS) is None  # nor a check as a tag


def test_what_is_longer_than_the_key_is_refused() -> None:
    data = packed.packet(packed.header(type=3), bytes(512))
    assert packed.parse(data, cases.KEYS) is None
    with pytest.raises(ValueError, match="fit"):
        tag_reference(data[:HEADER_BYTES], data[HEADER_BYTES:], cases.KEYS[0])
    with pytest.raises(ValueError, match="multiple of 8"):
        key_of(bytes(79), 0)

"""Where keys come from, which are in force, and what is taken once. Rules: auth-3, auth-4, auth-5, auth-8."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from support import MemoryStore, greeting
from tailbound.collective.speaker import Speaker, Voice
from tailbound.errors import ConfigError, LayoutError
from tailbound.transport import keys
from tailbound.transport.keys import APART, MOST, NEAR, Forgeries, KeyRing, Stamps, Word
from tailbound.transport.steps import STEP_MASK
from tailbound.wire.tag import EPOCH_BIT

MASTER = bytes(range(32))
PERIOD = 8 * NEAR


def test_hkdf_has_its_published_values() -> None:
    """RFC 5869, A.1."""
    secret = keys.extract(bytes(range(13)), b"\x0b" * 22)
    assert secret.hex() == "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    info = bytes(range(0xF0, 0xFA))
    assert keys.expand(secret, info).hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


@pytest.mark.parametrize("data", [MASTER, MASTER.hex().encode(), MASTER.hex().upper().encode() + b"\n"])
@pytest.mark.parametrize(
    ("mode", "user", "warns"),
    [
        (0o600, None, None),
        (0o644, None, "chmod 600"),
        (0o620, None, "written by other users"),
        (0o602, None, "written by other users"),
        pytest.param(0o600, 4321, "is of user 4321", marks=pytest.mark.needs("root")),
    ],
)
def test_a_key_file_is_read_and_its_rights_are_warned_of(
    key_file: Path, caplog: pytest.LogCaptureFixture, data: bytes, mode: int, user: int | None, warns: str | None
) -> None:
    key_file.write_bytes(data)
    key_file.chmod(mode)
    if user is not None:
        os.chown(key_file, user, -1)
    with caplog.at_level(logging.WARNING):
        assert keys.read_key(str(key_file)) == MASTER
    assert (warns or "") in caplog.text
    assert bool(caplog.records) == (warns is not None)
    assert MASTER.hex() not in caplog.text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        *((zeros, "zeros only") for zeros in (bytes(32), b"0" * 64)),
        *((wrong, "32") for wrong in (b"", MASTER[:31], MASTER + b"\n", b"secret of no use")),
        (None, "cannot be read"),
    ],
)
def test_what_cannot_be_a_key_is_refused_and_not_shown(key_file: Path, data: bytes | None, words: str) -> None:
    if data is None:
        key_file.unlink()
    else:
        key_file.write_bytes(data)
    with pytest.raises(ConfigError, match=words) as error:
        keys.read_key(str(key_file))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(("mode", "words"), [("drawn", ""), ("off", "no key"), ("file", "a file")])
def test_rank_0_says_which_key_it_has_and_who_waits_for_another_is_refused_at_once(
    key_file: Path, mode: str, words: str
) -> None:
    store, given = MemoryStore(), {"drawn": "drawn", "off": "", "file": str(key_file)}[mode]
    found = keys.agree(store, "job", 0, 1.0, given)
    if mode == "drawn":
        assert len(found or b"") == 32
        assert keys.agree(store, "job", 1, 1.0, mode) == found == keys.agree(store, "job", 0, 1.0, mode)
        assert keys.agree(store, "another", 0, 1.0, mode) != found
        return
    assert found == (MASTER if mode == "file" else None)
    with pytest.raises(LayoutError, match=f"rank 1 has .* rank 0 .*{words}"):
        keys.agree(store, "job", 1, 0.0, "drawn")


@pytest.mark.parametrize("said", ["drawn not hex", "drawn " + "ab" * 31, "drawn", "\x00\x01", "drawn\udcff key"])
def test_what_is_no_key_in_the_store_is_refused_with_what_to_do(said: str) -> None:
    store = MemoryStore()
    store.set("job/key", said.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"rank 1: 'job/key' of the store .* all ranks a key_file"):
        keys.agree(store, "job", 1, 1.0, "drawn")
    if said.startswith("drawn"):
        with pytest.raises(ConfigError, match=r"rank 0: .* store of its own"):
            keys.agree(store, "job", 0, 1.0, "drawn")


def test_every_job_has_secrets_of_its_own() -> None:
    one, other, anew = (
        greeting(rank, ranks=2, proof=f"of {rank}, {nonce}") for rank, nonce in ((0, 0), (1, 0), (1, 1))
    )
    first, second = keys.session(MASTER, [one, other]), keys.session(MASTER, [one, anew])
    assert first != second
    assert keys.path_key(first) not in (first, keys.path_key(second))
    rings = [KeyRing(first, 7, 64), KeyRing(first, 8, 64), KeyRing(second, 7, 64)]
    assert len({ring.now.tobytes() for ring in rings}) == 3
    assert all("key" not in repr(ring).lower().replace("keyring", "") for ring in rings)


def ring(turns: int = 0) -> tuple[KeyRing, list[int]]:
    installed = list[int]()
    return KeyRing(MASTER, 7, 64, turns, PERIOD, lambda epoch, key: installed.append(epoch)), installed


def in_force(made: KeyRing) -> set[bytes]:
    return {key.tobytes() for key in made.both}


@pytest.mark.parametrize("since", [0, STEP_MASK + 1 - 2 * PERIOD], ids=["at the beginning", "where labels begin anew"])
def test_two_keys_are_in_force_and_the_next_lies_ready(since: int) -> None:
    """Those of ranks a few steps before and behind are among them, all the time."""
    ranks = [ring()[0] for _ in range(3)]
    for at in range(since, since + 4 * PERIOD):
        for made, step in zip(ranks, (at, at - 3, at - 6), strict=True):
            turns = max(0, step - since) // PERIOD
            made.advance(step & STEP_MASK, turns)
            assert made.now is made.of(turns) is made.both[turns & 1]
            assert made.now[2] == EPOCH_BIT * (turns & 1)
        for made in ranks:
            assert in_force(made) >= {each.now.tobytes() for each in ranks}, at
    assert ranks[0].now.tobytes() not in in_force(ring()[0])
    assert not ranks[0].advance(at - 3 & STEP_MASK, 9)
    assert ranks[0].turns == 3, "a word of an older step changes nothing"


def test_stamps_rise_and_only_the_newest_counts() -> None:
    """A stranger may repeat one, or let it be overtaken."""
    speaker = SimpleNamespace(keys=1, voice=Voice())
    given = [Speaker.stamp(speaker) for _ in range(100)]  # type: ignore[arg-type]
    assert given == sorted(set(given))
    taken = Stamps()
    words = [taken.accept(1, given[at]) for at in (3, 3, 2, 4, 3, 4)]
    assert words == [Word.NEW, Word.AGAIN, Word.OLD, Word.NEW, Word.OLD, Word.AGAIN]
    assert taken.accept(2, given[1]) == Word.NEW


def test_what_was_said_before_a_process_came_back_does_not_count_there() -> None:
    taken = Stamps()
    assert taken.accept(1, 10) == Word.NEW, "recorded, and sent to the new process before it knows better"
    assert taken.accept(1, 20) == Word.NEW
    assert [taken.accept(1, stamp) for stamp in (10, 19, 21)] == [Word.OLD, Word.OLD, Word.NEW]
    assert taken.accept(1, 20) == Word.OLD, "it has said something since"


def test_tries_are_counted_by_epoch_and_said_once_and_another_key_is_asked_for_now_and_then() -> None:
    seen = Forgeries()
    assert not seen.count(MOST, 3)
    assert seen.count(MOST + 1, 3)
    assert not seen.count(MOST + 2, 3)
    assert seen.passed
    assert not seen.count(MOST + 5, 4)
    assert (seen.tried, seen.passed) == (3, False)
    assert not seen.count(2 * MOST + 2, 4)
    assert seen.count(2 * MOST + 3, 4)
    assert [seen.ask(now) for now in (0, 1, APART - 1, APART, APART + 1)] == [True, False, False, True, False]


def test_no_turn_comes_while_the_key_before_may_be_needed() -> None:
    made, installed = ring()
    for step in range(300 + 2 * PERIOD):
        assert made.advance(step, int(step >= 300)) == (step == 300)
        age = step - 300 if step >= 300 else step + NEAR
        assert (made.may_turn, made.old) == (age >= 2 * NEAR, age >= PERIOD)
        assert installed == [0, 1, 2][: 3 if step >= 300 + NEAR else 2]


def test_who_comes_back_has_the_keys_of_the_others_and_a_turn_that_is_foreseen_brings_its_own() -> None:
    made, late = ring()[0], ring(1)[0]
    for step in range(301):
        made.advance(step, int(step >= 200))
    assert made.now.tobytes() == late.now.tobytes()
    assert in_force(made) == in_force(late)
    made.advance(400, 2)
    for foreseen, other in ((2, 1), (3, 3)):
        made.foresee(foreseen)
        assert in_force(made) == {made.of(2).tobytes(), made.of(other).tobytes()}

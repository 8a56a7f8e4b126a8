"""Where keys come from, which are in force, and what is taken once. Rules: auth-3, auth-4, auth-5, auth-8."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from support import MemoryStore, greeting
from tailbound.errors import ConfigError, LayoutError
from tailbound.transport import keys
from tailbound.transport.forgeries import APART, MOST, Forgeries
from tailbound.transport.keys import KeyRing, Stamps, Word
from tailbound.transport.steps import STEP_MASK
from tailbound.wire.tag import EPOCH_BIT

MASTER = bytes(range(32))
PERIOD = 16


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


def ring(at: int = 0, period: int = PERIOD) -> tuple[KeyRing, list[int]]:
    made, installed = KeyRing(MASTER, 7, 64, at, period), list[int]()
    made.install = lambda epoch, key: installed.append(epoch)
    made.activate()
    return made, installed


def in_force(made: KeyRing) -> set[bytes]:
    return {key.tobytes() for key in made.both}


@pytest.mark.parametrize(
    "since", [0, STEP_MASK + 1 - 2 * PERIOD], ids=["in the first epochs", "where labels begin anew"]
)
def test_two_keys_are_in_force_and_the_next_lies_ready(since: int) -> None:
    made, installed = ring(since)
    for at in range(since, since + 5 * PERIOD):
        made.advance(at & STEP_MASK)
        epoch = at // PERIOD
        assert made.now is made.of(at & STEP_MASK) is made.both[epoch & 1]
        assert made.now[2] == EPOCH_BIT * (epoch & 1)
        for near in range(max(0, at - PERIOD // 2), at + PERIOD // 2):
            assert made.of(near & STEP_MASK).tobytes() in in_force(made), (at, near)
    assert sorted(installed)[-5:] == [since // PERIOD + i for i in range(1, 6)]
    assert made.now.tobytes() not in in_force(ring()[0])
    made.advance(at - 3 & STEP_MASK)  # a word of an older step changes nothing
    assert made.at == at


def test_stamps_rise_and_only_the_newest_counts() -> None:
    """A stranger may repeat one, or let it be overtaken."""
    made, _ = ring()
    given = [made.stamp() for _ in range(100)]
    assert given == sorted(set(given))
    taken = Stamps()
    words = [taken.accept(1, given[at]) for at in (3, 3, 2, 4, 3, 4)]
    assert words == [Word.NEW, Word.AGAIN, Word.OLD, Word.NEW, Word.OLD, Word.AGAIN]
    assert taken.accept(2, given[1]) == Word.NEW


def test_what_was_said_before_a_process_came_back_does_not_count_there() -> None:
    taken = Stamps()
    assert taken.accept(1, 10) == Word.NEW, "recorded, and sent to the new process before it knows better"
    assert taken.reset(1, 20)
    assert [taken.accept(1, stamp) for stamp in (10, 19, 21)] == [Word.OLD, Word.OLD, Word.NEW]
    assert not taken.reset(1, 20), "it has said something since"


LONG = 2048


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


def test_a_turn_makes_all_epochs_one_later() -> None:
    """Two keys are in force all the time, and those of the ranks a few steps before and behind are among them."""
    for since in (100, 1200):
        ranks, left = [ring(0, LONG)[0] for _ in range(3)], [0, 3, 6]  # so many steps behind
        for step in range(3 * LONG):
            for made, behind in zip(ranks, left, strict=True):
                at = step - behind
                if step == since - 10:
                    assert made.may_turn
                    made.foresee(1)
                if at >= 0:
                    made.advance(at, int(at >= since))
            sent = [made.of(made.at, made.turns).tobytes() for made in ranks]
            for made in ranks:
                assert in_force(made) >= set(sent), (since, step)
                assert made.now.tobytes() in in_force(made)
        assert {made.epoch for made in ranks} == {3}


def test_no_turn_comes_near_another_change_of_keys() -> None:
    made, apart = ring(0, LONG)[0], LONG // 32
    for step in range(1, 2 * LONG):
        made.advance(step, int(step >= 300))
        into = step % LONG
        assert made.may_turn == (apart <= into < LONG - apart and not 300 <= step < 300 + apart)


def test_who_comes_back_has_the_keys_of_the_others() -> None:
    """Those of a turn that was foreseen and did not come are in force no longer than they may be needed."""
    made, late = ring(0, LONG)[0], KeyRing(MASTER, 7, 64, 300, LONG, turns=1)
    for step in range(1, 301):
        made.advance(step, int(step >= 200))
    assert made.now.tobytes() == late.now.tobytes()
    assert made.epoch == late.epoch == 1
    made.foresee(2)
    made.foresee(1)
    assert in_force(made) == {made.now.tobytes(), made.of(300, 2).tobytes()}
    made.advance(1000, 1)
    assert made.now.tobytes() == KeyRing(MASTER, 7, 64, 1000, LONG, turns=1).now.tobytes()

"""Keys of a job: where they come from, and which are in force (auth-3, auth-4).

One secret of 32 bytes, the *master*, is a file's, or drawn by rank 0 and handed over the store. What packets, greetings
and the reliable path are authenticated with follows from it by HKDF-SHA256 (RFC 5869) and from the greetings of all
ranks, each of which has a number that was never used before: a job has keys of its own, also where the file stays.

Packets are tagged with the key of an *epoch*, which begins with the first step of an owner map that has one *turn* of
keys more than the one before. Ranks agree on such a map every ``EPOCH_STEPS`` steps, and sooner where somebody tries
keys (``Forgeries``). Two keys are in force at once, so that no rank waits when one gives way to the next: ranks are a
few steps apart.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import ConfigError, LayoutError
from tailbound.transport.config import MS
from tailbound.transport.rendezvous import Greeting, Store, wait_for
from tailbound.transport.steps import step_distance
from tailbound.wire.schema import KEY_WORDS
from tailbound.wire.tag import key_of

log = logging.getLogger("tailbound")

#: Bytes of a master, and of what is derived from it.
MASTER = 32
#: What rank 0 says that it has, and a key that it says.
_MODES, _HEX = ("off", "file", "drawn"), re.compile(rf"[0-9a-f]{{{2 * MASTER}}}")
#: Steps of an epoch at most. A rank that was stopped for half of them may hear no rank afterwards.
EPOCH_STEPS = 1 << 15
#: Steps of an epoch for which the key before stays in force. The next one is afterwards, and may be agreed on after
#: twice as many.
NEAR = 64
#: Turns of keys that a map can say: after so many an epoch lasts as long as it lasts.
_TURNS_MOST = 1 << 16
#: Tries that one rank lets pass in one epoch of its own: one of them passes with a chance of 2^-10.
MOST = 1 << 21
#: ns between two keys at least: whoever sends noise makes no more work than that. And between two words that one is
#: wanted, which may be lost.
APART, WORDS_APART = 10_000 * MS, 1_000 * MS


def extract(salt: bytes, secret: bytes) -> bytes:
    """HKDF-Extract of RFC 5869 with SHA-256."""
    return hmac.digest(salt or bytes(32), secret, "sha256")


def expand(secret: bytes, info: bytes) -> bytes:
    """The first 32 bytes of HKDF-Expand of RFC 5869 with SHA-256."""
    return hmac.digest(secret, info + b"\x01", "sha256")


def read_key(path: str) -> bytes:
    """The master in a file: 32 bytes, or as many in hexadecimal digits.

    Raises:
        ConfigError: there is no such file, or something else in it, zeros among that; the message has nothing of it.
    """
    try:
        data, about = Path(path).read_bytes(), Path(path).stat()
    except OSError as error:
        raise ConfigError(
            f"key_file {path} cannot be read: {error.strerror}; make one on one host and copy it to all (head -c 32 "
            "/dev/urandom > FILE, chmod 600 FILE)"
        ) from error
    if about.st_mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        can = "read" if about.st_mode & stat.S_IROTH else "written"
        log.warning("key_file %s can be %s by other users of this host: chmod 600 %s", path, can, path)
    if about.st_uid not in (0, os.geteuid()):
        log.warning("key_file %s is of user %d, who can read and change it: chown it", path, about.st_uid)
    key = data
    if len(data) != MASTER:
        with contextlib.suppress(ValueError):
            key = bytes.fromhex(data.decode())
    if key == bytes(MASTER):
        raise ConfigError(f"key_file {path} has zeros only: make one with head -c 32 /dev/urandom > {path}")
    if len(key) != MASTER:
        raise ConfigError(f"key_file {path} has {len(data)} bytes: give {MASTER}, or as many in hexadecimal digits")
    return key


def agree(store: Store, prefix: str, rank: int, timeout: float, key_file: str) -> bytes | None:
    """The master of the job; None: it has no key.

    Rank 0 says what it has, so that no rank waits for a key that it does not draw. A drawn one is what it says: whoever
    reads the store has it, too.

    Args:
        key_file: of this rank: the path of a file, ``drawn``, or empty.

    Raises:
        ConfigError: there is no key in the file, or in the store.
        LayoutError: rank 0 draws none.
        TransportError: rank 0 said nothing within ``timeout`` seconds.
    """
    name, mode = f"{prefix}/key", key_file if key_file == "drawn" else "file" if key_file else "off"
    if rank == 0:
        known = store.get(name).decode(errors="replace") if store.check([name]) else ""
        drawn = known if known.startswith("drawn") else f"drawn {secrets.token_hex(MASTER)}"
        store.set(name, drawn if mode == "drawn" else mode)
    if mode == "off":
        return None
    if mode == "file":
        return read_key(key_file)
    said, _, key = wait_for(store, name, 0, timeout, "hand over a key").decode(errors="replace").partition(" ")
    if said not in _MODES or (said == mode and not _HEX.fullmatch(key)):
        raise ConfigError(
            f"rank {rank}: {name!r} of the store does not hold a key of {MASTER} bytes; another program writes there: "
            "give the job a store of its own, or all ranks a key_file"
        )
    if said != mode:
        has = "no key" if said == "off" else "a file with one"
        raise LayoutError(f"rank {rank} has key_file=drawn, and rank 0 has {has}: give all ranks the same key_file")
    return bytes.fromhex(key)


def sign(master: bytes, own: Greeting) -> Greeting:
    """The own greeting with the proof that this rank has the master."""
    own = replace(own, nonce=secrets.token_hex(16))
    return replace(own, proof=prove(master, asdict(own)))


def prove(master: bytes, said: Mapping[str, Any]) -> str:
    """What shows that a greeting, as a mapping, is of a rank who has the master."""
    text = json.dumps({name: value for name, value in said.items() if name != "proof"}, sort_keys=True)
    return hmac.new(expand(extract(b"", master), b"tailbound greeting"), text.encode(), "sha256").hexdigest()


def verify(master: bytes, rank: int, said: Mapping[str, Any]) -> None:
    """Checks the greeting of the rank that is asked for.

    Raises:
        LayoutError: it is not of a rank who has the master.
    """
    if not hmac.compare_digest(prove(master, said).encode(), str(said.get("proof")).encode(errors="replace")):
        raise LayoutError(
            f"the greeting of rank {rank} was not made with this job's key: give every rank the same key_file; if they "
            "have it, another program writes to the store"
        )


def session(master: bytes, greetings: Sequence[Greeting]) -> bytes:
    """The secret of a job: of the master, and of all that its ranks said of themselves."""
    said = "".join(greeting.proof for greeting in greetings)
    return extract(hashlib.sha256(said.encode()).digest(), master)


def path_key(of_session: bytes) -> bytes:
    """The key of the reliable path."""
    return expand(of_session, b"tailbound reliable path")


class KeyRing:
    """The keys of one rank in one job.

    Args:
        secret: that of ``session``.
        cookie: of the job.
        width: bytes of a row at most.
        turns: of the owner map in force.
        period: steps of an epoch at most; fewer in tests.
        install: puts the key of an epoch in force where packets come in.

    Attributes:
        turns: number of the present epoch.
    """

    def __init__(
        self,
        secret: bytes,
        cookie: int,
        width: int,
        turns: int = 0,
        period: int = EPOCH_STEPS,
        install: Callable[[int, NDArray[np.uint64]], None] = lambda epoch, key: None,
    ) -> None:
        self._secret = expand(secret, b"tailbound rows" + cookie.to_bytes(4, "big"))
        self._width, self._period, self._install = width, period, install
        self.turns = turns
        self._age = NEAR  # steps of this epoch so far; who comes back needs no key before
        self._step: int | None = None
        self._known: dict[int, NDArray[np.uint64]] = {}
        self._epochs: tuple[int, ...] = ()
        self._renew()

    def __repr__(self) -> str:
        return f"KeyRing(epochs={self._epochs})"  # and nothing that is secret

    @property
    def now(self) -> NDArray[np.uint64]:
        """The key of this rank's present epoch."""
        return self.of(self.turns)

    @property
    def both(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """The keys in force: of the even epoch, and of the odd one."""
        even, odd = sorted(self._epochs, key=lambda epoch: epoch & 1)
        return self.of(even), self.of(odd)

    @property
    def may_turn(self) -> bool:
        """Whether all ranks have the next key, or can have it: none needs the one before."""
        return self._age >= 2 * NEAR and self.turns + 1 < _TURNS_MOST

    @property
    def old(self) -> bool:
        """Whether this epoch has lasted for long enough."""
        return self._age >= self._period

    def advance(self, step: int, turns: int) -> bool:
        """This rank has come as far as ``step``, under an owner map with so many turns; whether that has one more."""
        further = 0 if self._step is None else step_distance(step, self._step)
        if further < 0:
            return False
        more, self._step = turns > self.turns, step
        self._age = 0 if turns != self.turns else self._age + further
        self.turns = turns
        self._renew()
        return more

    def foresee(self, turns: int) -> None:
        """An owner map with so many turns may begin soon: the key that it brings is in force before."""
        if turns > self.turns:
            self._age = max(self._age, NEAR)
            self._renew()

    def _renew(self) -> None:
        """Puts the key of the present epoch in force, and that of the nearer other one."""
        other = self.turns - 1 if self.turns and self._age < NEAR else self.turns + 1
        before, self._epochs = self._epochs, (self.turns, other)
        for epoch in set(self._epochs).difference(before):
            self._install(epoch, self.of(epoch))

    def of(self, turns: int) -> NDArray[np.uint64]:
        """The key of an epoch near the present one."""
        found = self._known.get(turns)
        if found is None:
            secret = expand(self._secret, b"epoch" + turns.to_bytes(8, "big"))
            found = key_of(hashlib.shake_256(secret).digest(8 * (KEY_WORDS - 1) + self._width), turns)
            self._known = {e: key for e, key in self._known.items() if abs(e - turns) < 3} | {turns: found}
        return found


class Forgeries:
    """The tries at keys that one rank has seen, and its part in asking for another key (auth-8).

    Each packet without a right tag may be a try: one that is well made passes for at most one key of 2^31
    (``wire.tag``). What one learns from tries holds for that key only. So tries are counted by epoch, and when there
    are too many ranks agree on the next key before its time.

    Attributes:
        tried: in this epoch.
    """

    def __init__(self) -> None:
        self.tried = self._epoch = self._all = self._due = 0

    @property
    def passed(self) -> bool:
        """Whether there are more tries than ``MOST``."""
        return self.tried > MOST

    def count(self, forged: int, epoch: int) -> bool:
        """Takes the number of packets without a right tag so far; whether the bound has been passed by that.

        Args:
            forged: since the job began.
            epoch: the present one of this rank.
        """
        if epoch != self._epoch:
            self.tried = 0
        before = self.passed
        self.tried += forged - self._all
        self._epoch, self._all = epoch, forged
        return self.passed and not before

    def ask(self, now: int, apart: int = APART) -> bool:
        """Whether another key may be asked for now, ns; if so, it is, and not again for ``apart`` ns."""
        if now < self._due:
            return False
        self._due = now + apart
        return True


class Word(enum.IntEnum):
    """What a control packet is by its stamp."""

    OLD = 0  #: its sender has said something newer, so that it does not count
    NEW = 1
    AGAIN = 2  #: its sender repeats what it said last, or another rank does


class Stamps:
    """The newest control packet of every other rank: one that another has overtaken is as good as lost."""

    def __init__(self) -> None:
        self.newest: dict[int, int] = {}

    def accept(self, sender: int, stamp: int) -> Word:
        """Takes a packet, if it may count; or what ``sender`` says elsewhere, after which no older one counts."""
        newest = self.newest.get(sender, 0)
        if stamp < newest:
            return Word.OLD
        self.newest[sender] = stamp
        return Word.NEW if stamp > newest else Word.AGAIN

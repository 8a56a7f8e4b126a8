"""How often strangers may try the keys in force (auth-8). Pure, with the time passed in.

Each packet without a right tag may be a try: one that is well made passes for at most one key of 2^31 (``wire.tag``).
What one learns from tries holds for that key only. So tries are counted by epoch, and when there are too many ranks
agree on the next key before its time.
"""

from __future__ import annotations

from tailbound.transport.config import MS

#: Tries that one rank lets pass in one epoch of its own: one of them passes with a chance of 2^-10.
MOST = 1 << 21
#: ns between two keys that come before their time, at least: whoever sends noise makes no more work than that.
APART = 10_000 * MS
#: The same for the word that one is wanted, which may be lost.
WORDS_APART = 1_000 * MS


class Forgeries:
    """The tries that one rank has seen, and its part in asking for another key.

    Attributes:
        tried: in this epoch.
        passed: whether these are more than ``MOST``.
    """

    def __init__(self) -> None:
        self.tried, self.passed = 0, False
        self._epoch = self._before = self._all = 0
        self._due = 0

    def count(self, forged: int, epoch: int) -> bool:
        """Takes the number of packets without a right tag so far; whether the bound has been passed by that.

        Args:
            forged: since the job began.
            epoch: the present one of this rank.
        """
        if epoch != self._epoch:
            self._epoch, self._before, self.passed = epoch, self._all, False
        self._all, self.tried = forged, forged - self._before
        news = self.tried > MOST and not self.passed
        self.passed = self.passed or news
        return news

    def ask(self, now: int, apart: int = APART) -> bool:
        """Whether another key may be asked for now, ns; if so, it is, and not again for ``apart`` ns."""
        if now < self._due:
            return False
        self._due = now + apart
        return True

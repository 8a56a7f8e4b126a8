"""Questions that are asked again, ever more rarely, and given up: one back-off for all. Pure, with the time passed in.

Who asks has a ``Policy``. Times are ns.
"""

from __future__ import annotations

from typing import NamedTuple

#: Where a question is never given up, and where no wait is too long.
ALWAYS, UNBOUNDED = 1 << 30, 1 << 62
#: A wait doubles so often at most.
_DOUBLED = 20


class Policy(NamedTuple):
    """How a question is repeated: the wait doubles with every one.

    Attributes:
        first, most: how long an answer is waited for after the first question, and after any.
        times: questions without any answer that are enough.
    """

    first: int
    most: int = UNBOUNDED
    times: int = ALWAYS

    def wait(self, asked: int) -> int:
        """How long to wait after the ``asked``-th question (1, 2, ...)."""
        return min(self.most, self.first << min(asked - 1, _DOUBLED))


class Backoff:
    """One question.

    Args:
        policy: how it is repeated.
        due: when it is to be asked next.
        asked: how often it has been. One that begins at 1 takes what came last for the answer to a question.

    Attributes:
        due, asked: the same.
    """

    __slots__ = ("asked", "due", "policy")

    def __init__(self, policy: Policy, due: int = 0, asked: int = 0) -> None:
        self.policy, self.due, self.asked = policy, due, asked

    @property
    def over(self) -> bool:
        """Whether it has been asked often enough."""
        return self.asked >= self.policy.times

    def ask(self, now: int) -> None:
        """It is asked now."""
        self.asked += 1
        self.wait(now)

    def wait(self, now: int) -> None:
        """Waits anew, as long as after the last question."""
        policy = self.policy
        if self.asked <= 1:  # nearly always
            self.due = now + (policy.first if policy.first < policy.most else policy.most)
            return
        self.due = now + policy.wait(max(1, self.asked))


class AnswerTime:
    """How long an answer is waited for before the question counts as lost: twice what answers usually take.

    Args:
        least, most: bounds.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._usual = 0.0

    @property
    def value(self) -> int:
        """Until an answer has come, the least."""
        return min(self._most, max(self._least, int(2 * self._usual)))

    def add(self, took: int) -> None:
        """An answer came ``took`` after it was asked for."""
        self._usual += (took - self._usual) / 8

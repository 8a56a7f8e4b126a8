"""Questions that are asked again, ever more rarely: one back-off for all. Pure, with the time passed in.

Who asks has a ``Policy``. Times are ns.
"""

from __future__ import annotations

from typing import NamedTuple

#: A wait doubles so often at most.
_DOUBLED = 20


class Policy(NamedTuple):
    """How a question is repeated: the wait doubles with every one.

    Attributes:
        first, most: how long an answer is waited for after the first question, and after any.
    """

    first: int
    most: int

    def wait(self, asked: int) -> int:
        """How long to wait after the ``asked``-th question (1, 2, ...)."""
        return min(self.most, self.first << min(asked - 1, _DOUBLED))


class Backoff:
    """One question, repeated by ``policy``.

    Attributes:
        due: when it is to be asked next.
        asked: how often it has been.
    """

    __slots__ = ("asked", "due", "policy")

    def __init__(self, policy: Policy, due: int = 0) -> None:
        self.policy, self.due, self.asked = policy, due, 0

    def ask(self, now: int) -> None:
        """It is asked now."""
        self.asked += 1
        self.due = now + self.policy.wait(self.asked)

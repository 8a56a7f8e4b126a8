"""A loop that does not skip batches, on a rank that has lost the others: it makes iterations that count for nothing.

Only ``batches`` can leave iterations out. Without it a rank that takes another's state is ahead of its own program,
whose learning rate belongs to an earlier step, and which goes on by itself where the others are through. So iterations
are *void* until the program is where the job is: nothing is sent, averages are zeros, and whatever the optimizer makes
of them is written over by the state of another rank, which is taken at the end. Schedulers get there by themselves.

An iteration costs as much as ever, but for its communication. A program that does not get there in time goes on where
the job is, and lags. It makes void iterations again wherever no other rank begins the step that it is about to begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

#: Void iterations until a program that does not get there goes on with the job: so many times its first lag, and more.
_PATIENCE, _PATIENCE_MORE = 4, 16
#: So often another's state is taken for nothing, since the job has moved on meanwhile.
_TRIES = 3
#: Seconds that a rank which lags waits at least until another one begins its step, and in median steps.
_BEGIN, _BEGIN_STEPS = 0.1, 2.0


@dataclass
class Void:
    """Where the program's own loop is. Steps are backward passes whose gradients are averaged.

    Attributes:
        on: the present step is void.
        lag: steps of the job up to this rank's next one that the loop has not made; below zero: it has made more.
    """

    on: bool = False
    lag: int = 0
    _made: int = 0
    _most: int = 0
    _tries: int = 0

    def begin(self, lag: int) -> None:
        """Steps are void from now on, since the loop lags so many behind the others."""
        self.on, self._made, self._tries = True, 0, 0
        self._most = _PATIENCE * lag + _PATIENCE_MORE

    def made(self) -> None:
        """A void step has its gradients."""
        self.lag -= 1
        self._made += 1

    def there(self, behind: int) -> bool:
        """Whether the loop is where the others will be at the end of the step that the newest of them has begun.

        Args:
            behind: steps by which that one is ahead of this rank's next step.
        """
        return -self.lag > behind or self.lag == behind == 0

    def patient(self) -> bool:
        """Whether more void steps may help."""
        return self._made < self._most and self._tries < _TRIES

    def moved(self, steps: int) -> None:
        """This rank has gone on by ``steps``, and taken another's state. Void is over where the loop is as far."""
        self.lag += steps
        self._tries += 1
        self.on = self.lag != 0

    def whole(self, passes: int) -> bool:
        """Whether the loop lags by whole iterations, of ``passes`` backward passes each (0: iterations differ)."""
        return self.lag % passes == 0 if passes else self.lag == 0

    def waits(self, begun: Callable[[], bool], step_time: float) -> bool:
        """Of a loop that lags: whether it is to make a void step now, since nobody else begins the next one.

        Args:
            begun: says whether somebody has.
            step_time: seconds.
        """
        until = time.monotonic() + max(_BEGIN, _BEGIN_STEPS * step_time)
        while not begun():
            if time.monotonic() >= until:
                return True
            time.sleep(0.001)
        return False

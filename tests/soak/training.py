"""Part three: training whose ranks are stopped, killed and come back while packets get lost, over udp on loopback.

It goes by lives. In each, ranks are stopped for a while, and some are killed for good; then all is mended, those left
synchronize, and the next life begins with all ranks, those that were killed among them, from the checkpoint of one
that was left. That is how a job comes back under torchrun.

What must hold: who is left has the same bits in the end; and ranks that call themselves sound have the same bits before
every step, else the first step at which they had not is told.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from conftest import missing
from soak.part import Tell

#: One job at a time: its ranks are processes enough.
PROCESSES = 1
RANKS = 4
#: Seconds of trouble in a life, that it takes besides at least, and that those left may take to end it.
LIFE, OTHER, PATIENCE = 20.0, 15.0, 90.0
LOSSES = (0.0, 0.0, 0.01, 0.05, 0.2)
#: Steps that ranks may be apart when all is mended, and from then to the end.
APART, MORE = 4, 12


def lacking() -> str:
    """Why this part cannot run here, or nothing."""
    return missing("torch") or ""


def trouble(rng: random.Random, job: Any, loss: Any, tell: Tell, until: float) -> set[int]:
    """Something every now and then, from a seed but for how fast the machine is; mends all but ranks that were killed.

    Returns:
        The other ranks.
    """
    alive, stopped = set(range(RANKS)), dict[int, float]()  # until when

    def send(rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has failed, and says why in its result
            os.kill(job.processes[rank].pid, number)

    def go_on(now: float) -> None:
        for rank in [rank for rank, until in stopped.items() if until <= now]:
            del stopped[rank]
            send(rank, signal.SIGCONT)

    while (now := time.monotonic()) < until and all(job.processes[rank].is_alive() for rank in alive):
        go_on(now)
        what, rank = rng.random(), rng.choice(sorted(alive))
        if what < 0.4:
            loss.value = rng.choice(LOSSES)
        elif what < 0.9 and rank not in stopped:
            send(rank, signal.SIGSTOP)
            stopped[rank] = now + rng.choice((0.05, 0.3, 1.0, 3.0))
            tell("stops", 1)
        elif what >= 0.9 and len(alive) > RANKS - 1 - rng.randrange(2):
            stopped.pop(rank, None)
            alive.discard(rank)
            job.processes[rank].kill()
            tell("kills", 1)
        time.sleep(min(rng.uniform(0.1, 1.5), max(0.0, until - time.monotonic())))
    loss.value = 0.0
    go_on(float("inf"))
    return alive


def complaints(results: Mapping[int, Mapping[str, Any]], began_with: str = "") -> list[str]:
    """What is wrong with a life, in words.

    Args:
        results: of ``churn_jobs.churning`` by rank, of those that were left.
        began_with: digest of the checkpoint that it began with.
    """
    wrong = []
    if began_with and any(result["first"] != began_with for result in results.values()):
        wrong.append("a rank began with something else than the checkpoint")
    for step in sorted({step for result in results.values() for step in result["seen"]}):
        held = {rank: result["seen"][step] for rank, result in results.items() if step in result["seen"]}
        sound = {rank: digest[:8] for rank, (digest, well) in held.items() if well}
        if len(set(sound.values())) > 1:
            wrong.append(f"parted before step {step} although sound: {sound}")
            break
    if not all(result["synchronized"] for result in results.values()):
        told = {rank: (result["synchronized"], result["last"]) for rank, result in results.items()}
        wrong.append(f"not synchronized: {told}")
    elif len({result["digest"] for result in results.values()}) > 1:
        wrong.append(f"synchronized and unlike: { {rank: result['digest'][:8] for rank, result in results.items()} }")
    return wrong


def _in_step(steps: Any, alive: set[int], until: float) -> int:
    """Waits until ranks go on and are near each other; the step of the first."""
    began = max(steps[rank] for rank in alive)
    while time.monotonic() < until:
        now = [steps[rank] for rank in alive]
        if min(now) > began and max(now) - min(now) <= APART:
            break
        time.sleep(0.1)
    return max(steps[rank] for rank in alive)


def life(
    seed: int, folder: Path, seconds: float, tell: Tell, began_with: str = "", spoilt: int = -1
) -> tuple[list[str], str]:
    """One life, with ``seconds`` of trouble in it.

    Returns:
        What is wrong, in words; the digest of the checkpoint that it leaves in ``folder``.

    Raises:
        AssertionError, TimeoutError: a rank failed, or did not end.
    """
    import churn_jobs
    from processes import Job

    rng, context = random.Random(seed), multiprocessing.get_context("forkserver")
    loss, last, steps = context.Value("d", 0.0), context.Value("q", -1), context.Array("q", RANKS)
    checkpoint = folder / "checkpoint"
    shared = rng.random() < 0.5, spoilt, checkpoint, loss, last, steps
    with Job(churn_jobs.churning, RANKS, folder, *shared, patience=seconds + PATIENCE) as job:
        until = time.monotonic() + PATIENCE
        while min(steps) < 2 and time.monotonic() < until and all(p.is_alive() for p in job.processes):
            time.sleep(0.05)
        # a rank that has not begun says why in its result
        until = time.monotonic() + seconds if min(steps) >= 2 else 0.0
        alive = trouble(rng, job, loss, tell, until)
        last.value = _in_step(steps, alive, time.monotonic() + PATIENCE / 3) + MORE
        results = {rank: job.result(rank) for rank in sorted(alive)}
    tell("steps", max(steps))
    tell("lives", 1)
    for name in ("jumps", "steps_applied", "ops_incomplete"):
        tell(name, sum(result["counters"].get(name, 0) for result in results.values()))
    left = rng.choice(sorted(results))
    os.replace(checkpoint.with_suffix(f".{left}"), checkpoint)
    return complaints(results, began_with), results[left]["digest"]


@contextlib.contextmanager
def trials(number: int, tell: Tell, until: float) -> Iterator[Callable[[int], str]]:
    """A life a seed; each begins with the checkpoint of the one before, unless that failed."""
    with tempfile.TemporaryDirectory(prefix="tailbound-soak-") as name:
        folder, digest = Path(name), ""

        def trial(seed: int) -> str:
            nonlocal digest
            began_with, digest = digest, ""
            if not began_with:
                (folder / "checkpoint").unlink(missing_ok=True)
            seconds = min(LIFE, max(1.0, until - time.monotonic() - OTHER))
            wrong, digest = life(seed, folder, seconds, tell, began_with)
            return "; ".join(wrong)

        yield trial

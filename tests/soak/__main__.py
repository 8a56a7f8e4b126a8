"""``make soak``: tries at random for as long as it is told; ``python -m soak --minutes 10`` in ``tests``.

The time is divided between the parts. Each says every ten seconds how far it is, and prints what it finds. The exit
status is 1 where anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import sys

from soak import part

PARTS = ("jobs", "packets", "sanitized", "flood", "training")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts together")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seed", type=int, help="default: another one every time")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1000) * 100 * part.STRIDE if options.seed is None else options.seed
    lacking = {name: getattr(importlib.import_module(f"soak.{name}"), "lacking", str)() for name in options.parts}
    parts, found = [name for name in options.parts if not lacking[name]], list[str]()
    print(*(f"{name}: left out: {why}\n" for name, why in lacking.items() if why), sep="", end="")
    print(f"seed {seed}, {options.minutes:g} minutes for: {', '.join(parts)}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for name in parts:
            part.run(name, seed, options.minutes * 60 / len(parts), options.processes, found)
    print(f"found: {len(found) or 'nothing'}")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())

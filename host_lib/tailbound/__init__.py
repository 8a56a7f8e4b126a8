"""Tailbound: an all-reduce for data-parallel training that finishes in bounded time.

Gradients travel as datagrams, are summed inside the kernel by XDP programs on the workers' own interfaces, and a step
never waits for the last packet or the slowest peer longer than a deadline. Start at ``tailbound.torch.register``.
"""

from __future__ import annotations

__version__ = "0.1.0"

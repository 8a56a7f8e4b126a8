"""The demo: real data, a real training, lossy links, Tailbound beside Gloo (``tailbound demo``)."""

from __future__ import annotations

from pathlib import Path

__all__ = ["run"]


def run(*, out: Path, quick: bool = False, datapath: str = "auto", workers: int = 4) -> None:
    """Runs it; see ``tailbound_lab.demo.run.run``."""
    from tailbound_lab.demo.run import run as run_demo

    run_demo(out=out, quick=quick, datapath=datapath, workers=workers)

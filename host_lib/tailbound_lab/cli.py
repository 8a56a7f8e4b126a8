"""The laboratory's part of the command line: the verb ``demo``, and labs for users without root."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from tailbound.doctor.facts import has_capability
from tailbound.observe import status
from tailbound_lab.lab import user_namespace

#: Verbs of ``bench`` that need no network, or that need XDP, which user namespaces lack.
_NOT_IN_USER_NAMESPACES = {"kernel", "codec"}


@click.command(context_settings={"show_default": True})
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default="out/demo", help="Folder for the results."
)
@click.option("--quick", is_flag=True, help="A shorter training.")
@click.option(
    "--datapath", type=click.Choice(["auto", "xdp", "udp"]), default="auto", help="How gradients are received."
)
@click.option("--workers", type=click.IntRange(2, 256), default=4, help="Ranks.")
def demo(out: Path, quick: bool, datapath: str, workers: int) -> None:
    """Train a real model over a lossy network, beside Gloo."""
    length = "half a minute" if quick else "two to three minutes"
    click.echo(f"The same training twice, over Gloo and over Tailbound, on a lossy network: about {length}.")
    from tailbound_lab.demo.run import run

    run(out=out, quick=quick, datapath=datapath, workers=workers)


def builds_a_lab(words: Sequence[str]) -> bool:
    """Return whether this command line builds a lab that works without XDP. A request for help builds none."""
    verb, what = ([*words, "", ""])[:2]
    if {"-h", "--help"} & set(words[: 2 if verb == "demo" else 3]):
        return False
    if verb == "bench":
        return what not in {"", *_NOT_IN_USER_NAMESPACES}
    return verb == "demo" or (verb, what) == ("lab", "run")


def enter_user_namespace(words: Sequence[str]) -> None:
    """Restart this command line in a user namespace if it builds a lab that this user may not build otherwise."""
    if not builds_a_lab(words) or user_namespace.REFUSED in os.environ:
        return
    if has_capability("CAP_SYS_ADMIN", "CAP_NET_ADMIN"):
        return
    folder = status.folder()  # the calling user's, where `tailbound top` looks, and not that of root inside
    os.environ.setdefault(status.VARIABLE, "off" if folder is None else str(folder))
    user_namespace.restart()

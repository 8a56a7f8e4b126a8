"""``tailbound bench``: verbs only; each benchmark is a module of its own with a ``run``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailbound.bench.table import show
from tailbound.lab.cli import spec_from_options, spec_options

__all__ = ["bench"]

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


if TYPE_CHECKING:
    _IntegerType = click.ParamType[int]
else:
    _IntegerType = click.ParamType  # generic in new versions of click only


class _Size(_IntegerType):
    """Bytes, written ``25MiB``, ``64KiB`` or ``1000000``."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?b)?", str(value).strip().lower())
        size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
        if size < 4:
            self.fail(f"{value!r} is not a size of at least 4 bytes: write for example 25MiB or 64KiB", param, ctx)
        return size


_JSON = click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows to this file, too."
)
_QUICK = click.option("--quick", is_flag=True, help="Fewer repetitions.")


@click.group(context_settings={"show_default": True})
def bench() -> None:
    """Measure the kernel path, the codec, whole all-reduces."""


@bench.command()
@click.option("--loader", type=click.Choice(["bcc", "clang", "both"]), default="both", help="Which build to measure.")
@_QUICK
@_JSON
def kernel(loader: str, quick: bool, json_file: Path | None) -> None:
    """Nanoseconds a packet costs in the kernel (BPF_PROG_TEST_RUN, op and rank rotated)."""
    from tailbound.bench.kernel import run

    loaders = ("bcc", "clang") if loader == "both" else (loader,)
    show("Kernel path", run(json_file, loaders=loaders, quick=quick))


@bench.command()
@_QUICK
@_JSON
def codec(quick: bool, json_file: Path | None) -> None:
    """Milliseconds that encoding, averaging and decoding take."""
    from tailbound.bench.codec import run

    show("Codec", run(json_file, quick=quick))


@bench.command()
@spec_options
@click.option("--size", "sizes", type=_Size(), multiple=True, default=("25MiB", "1MiB"), help="Bytes of float32.")
@click.option("--iters", type=click.IntRange(1), default=50, help="All-reduces of each size.")
@click.option("--vs", type=click.Choice(["gloo", "none"]), default="gloo", help="Whom to measure in turn.")
@click.option("--datapath", type=click.Choice(["auto", "xdp", "udp"]), default="auto", help="How we receive.")
@_JSON
def allreduce(sizes: tuple[int, ...], iters: int, vs: str, datapath: str, json_file: Path | None, **lab: Any) -> None:
    """All-reduces of worker processes in a lab, interleaved with Gloo's."""
    from tailbound.bench.allreduce import run

    run(spec_from_options(lab), sizes=sizes, iters=iters, vs=vs, datapath=datapath, json_file=json_file)

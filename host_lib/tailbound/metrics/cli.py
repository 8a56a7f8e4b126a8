"""``tailbound metrics``: all ranks on this host for Prometheus, read from their status files."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from types import ModuleType

import click

from tailbound.errors import CapabilityError
from tailbound.metrics.host import host_metrics
from tailbound.observe import status

__all__ = ["metrics"]


@click.command(context_settings={"show_default": True})
@click.option("--port", type=click.IntRange(0, 65535), default=9463, help="TCP port; 0: any free port.")
@click.option("--address", default="0.0.0.0", help="Address to listen on; 127.0.0.1 serves this host only.")  # noqa: S104
@click.option("--once", is_flag=True, help="Print one reading and end.")
@click.option(
    "--folder", type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the status files; default: TAILBOUND_STATUS, or the usual places.",
)  # fmt: skip
def metrics(port: int, address: str, once: bool, folder: Path | None) -> None:
    """Serve the metrics of every rank on this host to Prometheus.

    Trainers need no package for it. Root sees all users' ranks, other users their own.
    """
    prometheus = _prometheus()
    where = (lambda: [folder]) if folder is not None else status.folders
    collector = prometheus.MetricsCollector(partial(host_metrics, where))
    if once:
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        click.echo(generate_latest(registry).decode(), nl=False)
        return
    with prometheus.Endpoint(collector, port, address) as endpoint:
        click.echo(f"http://{address}:{endpoint.port}/metrics, until Ctrl-C")
        while True:
            signal.pause()


def _prometheus() -> ModuleType:
    try:
        from tailbound.metrics import prometheus
    except ImportError as error:
        raise CapabilityError("serving metrics needs a package: pip install 'tailbound[prometheus]'") from error
    return prometheus

"""``tailbound metrics``: all ranks on this host for Prometheus, read from the status files that they write anyway.

A trainer needs no package for it; the command needs the extra ``prometheus``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import click

from tailbound.errors import CapabilityError, ConfigError
from tailbound.metrics.flatten import Metric, flatten
from tailbound.observe import status

__all__ = ["host_metrics", "metrics"]

#: Seconds after which nothing but its age is told of a status: its content is out of date.
SILENT = 30.0


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

    Trainers need no package for it.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest, start_http_server
    except ImportError as error:
        raise CapabilityError("serving metrics needs a package: pip install 'tailbound[prometheus]'") from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(cast(Any, _Collector(lambda: [folder] if folder else status.folders())))
    if once:
        if folder is not None and not folder.is_dir():  # a server waits for it: ranks may begin later
            raise ConfigError(f"--folder {folder} is not there: give the ranks' TAILBOUND_STATUS")
        click.echo(generate_latest(registry).decode(), nl=False)
        return
    try:
        server, _ = start_http_server(port, address, registry)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served at {address}:{port} ({error.strerror}): give another --port or --address"
        ) from error
    click.echo(f"http://{address}:{server.server_port}/metrics, until Ctrl-C")
    while True:
        signal.pause()


class _Collector:
    """One family for each name, read anew at every scrape."""

    def __init__(self, where: Callable[[], Iterable[Path]]) -> None:
        self._where = where

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for metric in host_metrics(self._where()):
            family = families.get(metric.name)
            if family is None:
                make = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
                family = families[metric.name] = make(metric.name, metric.help, labels=list(metric.labels))
            family.add_metric(list(metric.labels.values()), metric.value)
        return families.values()


def host_metrics(where: Iterable[Path]) -> list[Metric]:
    """One reading of the folders ``where``."""
    return [metric for one in status.read(where) for metric in _of(one)]


def _of(one: Mapping[str, Any]) -> list[Metric]:
    """A rank's metrics; none of a file that is not a status of this version."""
    labels = {"rank": str(one["rank"]), "job": str(one.get("cookie"))}
    text = "Seconds since the rank wrote its status: a process that is stopped or was killed writes none."
    age = Metric("tailbound_status_age_seconds", one["age"], labels, text)
    if one["age"] > SILENT:
        return [age]
    try:
        return [*flatten(one), age]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return []

"""``stats()`` for Prometheus: ``serve(state)`` answers scrapes of this rank; the extra ``prometheus``.

A scrape takes one ``stats()`` in the server's thread; between scrapes it costs nothing. A rank serves at a port of its
own, ``TAILBOUND_PROMETHEUS_PORT`` (9464) plus its LOCAL_RANK, so a host of 8 ranks is 8 targets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("tailbound.metrics.prometheus needs a package: pip install 'tailbound[prometheus]'") from error

from tailbound.errors import ConfigError
from tailbound.metrics.flatten import Metric as Reading
from tailbound.metrics.flatten import flatten
from tailbound.settings.table import PROMETHEUS_PORT


class Source(Protocol):
    """What has ``stats()``: a ``TailboundState``, a ``Communicator``."""

    def stats(self) -> Mapping[str, Any]:
        """Counters in plain types."""


class MetricsCollector(Collector):
    """What ``read`` returns, taken anew at every scrape; for a registry of your own."""

    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Nothing: names depend on what there is, and a registry need not know them before."""
        return []

    def collect(self) -> Iterable[Metric]:
        """One family for each name."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for metric in self._read():
            family = families.get(metric.name)
            if family is None:
                make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = families[metric.name] = make(metric.name, metric.help, labels=list(metric.labels))
            family.add_metric(list(metric.labels.values()), metric.value)
        return families.values()


class StatsCollector(MetricsCollector):
    """Metrics of ``source``, taken anew at every scrape; for a registry of your own."""

    def __init__(self, source: Source) -> None:
        super().__init__(lambda: flatten(source.stats()))


class Endpoint:
    """A running server; ``close`` ends it, as does the end of the process.

    Raises:
        ConfigError: the port or the address cannot be had.
    """

    def __init__(self, collector: Collector, port: int, address: str) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be served at {address}:{port} ({error.strerror}): pass another port= or address=, or "
                f"set {PROMETHEUS_PORT.variable} (0: any port that is free)"
            ) from error
        #: the port that was taken
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Ends the server; may be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(source: Source, port: int | None = None, address: str = "0.0.0.0") -> Endpoint:  # noqa: S104
    """Answers ``GET /metrics`` in a daemon thread from now on.

    Args:
        source: a ``TailboundState`` or ``Communicator``.
        port: TCP port; 0: any that is free; None: ``TAILBOUND_PROMETHEUS_PORT`` (9464) plus LOCAL_RANK.
        address: of this host; ``127.0.0.1`` keeps others out.

    Raises:
        ConfigError: the port or the address cannot be had.
    """
    if port is None:
        first = int(PROMETHEUS_PORT.read())
        port = first and first + int(os.environ.get("LOCAL_RANK", "0"))
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} for metrics is outside 0..65535: choose a smaller {PROMETHEUS_PORT.variable}")
    return Endpoint(StatsCollector(source), port, address)

"""Metrics of the exchange between nodes, collected at each scrape.

pilotlight_weights_peers                     by state: asked, resting (backing off after a failure), distrusted (sent corrupt bytes), silent
pilotlight_weights_peer_distrusted           by peer: 1 while it is distrusted. Check that node's disk
pilotlight_weights_peer_failures_total       by reason: absent, busy (both are answers), unreachable, slow, broken, refused, wrong
pilotlight_weights_peer_received_bytes_total verified and stored
pilotlight_weights_peer_served_bytes_total   sent to other nodes
pilotlight_weights_peer_busy_total           requests refused because all upload slots were taken
pilotlight_weights_peer_refused_total        by reason: absent, forged, misaddressed, stale, replayed, flooded
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weight_cache.peers.fetcher import PeerFetcher
from weight_cache.peers.membership import PeerMembership
from weight_cache.peers.server import PeerServer

_STATES = ("asked", "resting", "distrusted", "silent")


class PeerCollector(Collector):
    """Exports the state of the exchange as metrics. Stateless. `server` is None if this node does
    not serve peers."""

    def __init__(
        self, *, membership: PeerMembership, exchange: PeerFetcher, server: PeerServer | None
    ) -> None:
        self._membership = membership
        self._exchange = exchange
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """All metrics, once per scrape."""
        prefix = "pilotlight_weights_peer"
        states = dict(self._membership.states())
        counted = Counter(states.values())
        peers = GaugeMetricFamily(f"{prefix}s", "Other nodes by state.", labels=["state"])
        for state in _STATES:
            peers.add_metric([state], counted[state])
        yield peers
        distrusted = GaugeMetricFamily(
            f"{prefix}_distrusted", "Peers that sent corrupt bytes.", labels=["peer"]
        )
        for address, state in states.items():
            if state == "distrusted":
                distrusted.add_metric([address], 1)
        yield distrusted
        failures = CounterMetricFamily(
            f"{prefix}_failures", "Failed requests to peers, by reason.", labels=["reason"]
        )
        for failure, count in self._membership.failures.items():
            failures.add_metric([failure.value], count)
        yield failures
        yield CounterMetricFamily(
            f"{prefix}_received_bytes", "Verified from peers.", self._exchange.received.bytes
        )
        if self._server is not None:
            yield from _of_server(prefix, self._server)


def _of_server(prefix: str, server: PeerServer) -> Iterator[Metric]:
    yield CounterMetricFamily(f"{prefix}_served_bytes", "Sent to peers.", server.served.bytes)
    yield CounterMetricFamily(f"{prefix}_busy", "Requests refused as busy.", server.served.busy)
    refused = CounterMetricFamily(
        f"{prefix}_refused", "Requests without a valid token.", labels=["reason"]
    )
    for reason, count in server.served.refused.items():
        refused.add_metric([reason], count)
    yield refused

"""What the controller counts. Every name is here.

| name | type | labels | what |
|---|---|---|---|
| `pilotlight_controller_requests_total` | counter | `route`, `status` | answers |
| `pilotlight_controller_request_seconds` | histogram | `route` | time to the first byte of the answer |
| `pilotlight_controller_deploys_total` | counter | - | deploys that went through |
| `pilotlight_controller_feed_followers` | gauge | - | long polls that wait now |
| `pilotlight_controller_feed_changes_total` | counter | - | changes sent |
| `pilotlight_controller_usage_records_total` | counter | - | usage records that were new |
| `pilotlight_controller_usage_conflicts_total` | counter | - | usage ids that came with other content: a defect of the sender |
| `pilotlight_controller_blob_bytes_total` | counter | - | bytes of blobs received |
"""

from __future__ import annotations

import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

_PREFIX = "pilotlight_controller_"


class Metrics:
    """The controller's own registry. Safe from any thread."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(_PREFIX + "requests", "Answers", ["route", "status"], registry=registry)
        self.request_seconds = Histogram(_PREFIX + "request_seconds", "Time to the first byte", ["route"], registry=registry)
        self.deploys = Counter(_PREFIX + "deploys", "Deploys that went through", registry=registry)
        self.feed_followers = Gauge(_PREFIX + "feed_followers", "Long polls that wait now", registry=registry)
        self.feed_changes = Counter(_PREFIX + "feed_changes", "Changes sent to followers", registry=registry)
        self.usage_records = Counter(_PREFIX + "usage_records", "New usage records", registry=registry)
        self.usage_conflicts = Counter(_PREFIX + "usage_conflicts", "Usage ids that came with other content", registry=registry)
        self.blob_bytes = Counter(_PREFIX + "blob_bytes", "Bytes of blobs received", registry=registry)

    def serve(self, listen: str) -> tuple[WSGIServer, threading.Thread]:
        """Serve them as Prometheus text on `host:port`; returns the server and its thread. Raises OSError."""
        host, _, port = listen.rpartition(":")
        return start_http_server(int(port), addr=host or "127.0.0.1", registry=self.registry)

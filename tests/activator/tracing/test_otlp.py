"""Kept traces reach an OpenTelemetry collector over HTTP, and one that is down costs a bounded
number of losses."""

from __future__ import annotations

import gzip
import http.server
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from activator.tracing.otlp import OtlpExport
from activator.tracing.trace_builder import Json

TRACE, OTHER = "4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c"
ROOT, EXEC, CALLER = "00f067aa0ba902b7", "00f067aa0ba902b8", "b7ad6b7169203331"


class Collector(http.server.ThreadingHTTPServer):
    """Takes OTLP over HTTP, as a collector does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths: list[str] = []
        self.requests: list[ExportTraceServiceRequest] = []
        self.came = threading.Event()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[Any]:
        """All that came."""
        return [
            span
            for one in self.requests
            for r in one.resource_spans
            for s in r.scope_spans
            for span in s.spans
        ]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.paths.append(self.path)
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
        self.server.came.set()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def trace(**root: Any) -> Json:
    spans = [
        {
            "id": ROOT,
            "parent": CALLER,
            "name": "POST",
            "kind": "server",
            "begin_ms": 0.0,
            "ms": 20.0,
            "error": "",
            **root,
            "attributes": {
                "faas.name": "shop/hello",
                "faas.coldstart": True,
                "pilotlight.attempts": 1,
                "x": 0.5,
            },
        },
        {
            "id": EXEC,
            "parent": ROOT,
            "name": "exec",
            "kind": "client",
            "begin_ms": 5.0,
            "ms": 10.0,
            "error": "500",
            "attributes": {},
        },
    ]
    return {"id": TRACE, "call": "req-1", "at": 1_800_000_000.25, "spans": spans}


def closed(export: OtlpExport) -> OtlpExport:
    export.close()
    return export


def test_a_collector_gets_ids_times_kinds_attributes_and_links(collector: Collector) -> None:
    export = OtlpExport(collector.url, instance="a-0")
    export.put(trace(links=[f"{OTHER}-{CALLER}"]))
    assert collector.came.wait(20)
    closed(export)

    assert collector.paths == ["/v1/traces"]
    root, execution = collector.spans()
    assert (root.trace_id.hex(), root.span_id.hex(), root.parent_span_id.hex()) == (
        TRACE,
        ROOT,
        CALLER,
    )
    assert execution.parent_span_id.hex() == ROOT
    assert (root.kind, execution.kind) == (2, 3)  # SERVER, CLIENT
    assert (root.status.code, execution.status.code) == (0, 2)  # UNSET, ERROR
    assert root.start_time_unix_nano == 1_800_000_000_250_000_000
    assert execution.end_time_unix_nano - execution.start_time_unix_nano == 10_000_000
    assert {a.key: a.value.WhichOneof("value") for a in root.attributes} == {
        "faas.name": "string_value",
        "faas.coldstart": "bool_value",
        "pilotlight.attempts": "int_value",
        "x": "double_value",
    }
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in root.links] == [(OTHER, CALLER)]
    told = {
        a.key: a.value.string_value
        for a in collector.requests[0].resource_spans[0].resource.attributes
    }
    assert (told["service.name"], told["service.instance.id"]) == ("pilotlight", "a-0")
    assert (export.exported, export.dropped) == (1, 0)


def test_an_endpoint_with_a_path_is_taken_as_it_is(collector: Collector) -> None:
    export = OtlpExport(collector.url + "/otlp/traces", instance="a-0")
    export.put(trace())
    assert collector.came.wait(20)
    closed(export)
    assert collector.paths == ["/otlp/traces"]


def test_what_is_held_at_the_end_is_still_exported(collector: Collector) -> None:
    export = OtlpExport(collector.url, instance="a-0")
    for _ in range(3):
        export.put(trace())
    closed(export)
    assert (len(collector.spans()), export.exported, export.dropped) == (6, 3, 0)


def test_a_collector_that_is_down_holds_nobody_up_and_losses_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
    export = OtlpExport(nobody, instance="a-0", max_held=5, timeout_s=0.2, pause_s=3600.0)
    for _ in range(500):
        export.put(trace())
    closed(export)
    assert export.exported == 0
    assert export.dropped == 500

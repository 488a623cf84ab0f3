"""The server of grpcio: its options, which bound what peers may do before a method runs.

It decompresses messages itself, and ends at their largest size; grpcio before 1.85 looked at the
size of what arrived, of which a thousand times as much can become."""

from __future__ import annotations

from typing import Final

import grpc
import grpc.aio

MAX_STREAMS: Final = 100
"""Concurrent calls of a connection, as HTTP/2 servers usually allow."""
_OPTIONS: Final = (
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 32 * 1024),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # a client may ask each 10 s whether the connection lives; one that asks more often is cut off
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
    # windows do not grow with the bandwidth: they bound what is received before it is read
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 256 * 1024),
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", -1),
)


def new_server(handler: grpc.GenericRpcHandler, *, max_message_bytes: int) -> grpc.aio.Server:
    """Return a server without addresses, which is not started. `max_message_bytes`: of a message,
    also decompressed."""
    size = ("grpc.max_receive_message_length", max_message_bytes)
    server = grpc.aio.server(options=(*_OPTIONS, size))
    server.add_generic_rpc_handlers((handler,))
    return server

"""HTTP without TLS, for tests that make many clients: each `httpx.Client` of its own reads all
certificates of the machine, 30 ms."""

from __future__ import annotations

import ssl

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""`verify=` of a client that speaks to http:// and Unix sockets only; it trusts no server with a
certificate."""

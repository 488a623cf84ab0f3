"""The request pipeline (route, authenticate, admit, reserve, forward, meter), its fast path, and
the proxies beside it: raw HTTP, WebSocket, the control plane.

`calls` runs the calls.
"""

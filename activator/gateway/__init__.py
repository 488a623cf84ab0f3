"""The sentence of a request (route, authenticate, admit, reserve, forward, meter), its fast path,
and the entrances beside it: raw HTTP, WebSocket, the control plane.

How a call is run is in `calls`.
"""

"""Connections from the activator to workers: HTTP/1.1 over Unix sockets and TCP, and the sleep mode
of engines."""

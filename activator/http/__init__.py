"""HTTP between the activator and its callers: the server, requests, response headers and bodies,
server-sent events, and the identity of peers.

`gateway` and `routing` decide what a request means.
"""

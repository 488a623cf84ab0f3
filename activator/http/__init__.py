"""HTTP between the activator and its callers: the server, requests and their bodies, server-sent
events, and the identity of peers.

`gateway` and `access` decide what a request means.
"""

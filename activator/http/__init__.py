"""HTTP between the activator and its callers: the server, requests, heads and bodies of answers,
server-sent events, who connects.

What a request means is decided in `gateway` and `routing`.
"""

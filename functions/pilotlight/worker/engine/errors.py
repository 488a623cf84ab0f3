"""Errors of a server that a worker runs: an engine, or a web server of user code. The names are
user-facing: they are shown as the type of a failed start."""

from __future__ import annotations


class ServerDied(Exception):
    """Raised when a process of the server ended unexpectedly; the message has its status and its
    last lines."""


class ServerHung(Exception):
    """Raised when the server is running but does not answer within its time limit."""


class ServerRefused(Exception):
    """Raised when the server answers its warm-up with an error, which the message contains."""


class WrongAnswer(Exception):
    """Raised when the server answers its known prompt or its example differently than before the
    snapshot."""

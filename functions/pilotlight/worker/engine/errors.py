"""Errors of an engine. The names are user-facing: they are shown as the type of a failed start."""

from __future__ import annotations


class EngineDied(Exception):
    """Raised when a process of the engine's tree ended unexpectedly; the message has its status and
    its last lines."""


class EngineHung(Exception):
    """Raised when the engine is running but does not answer within its time limit."""


class EngineRefused(Exception):
    """Raised when the engine answers its warm-up with an error, which the message contains."""


class WrongAnswer(Exception):
    """Raised when the engine answers the known prompt differently than before the snapshot."""

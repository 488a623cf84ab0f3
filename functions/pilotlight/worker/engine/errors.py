"""What goes wrong with an engine. User-facing names: they are shown as the type of a failed
start."""

from __future__ import annotations


class EngineDied(Exception):
    """Raised when a process of the engine's tree ended that should be there; the message has its
    status and its last lines."""


class EngineHung(Exception):
    """Raised when the engine lives and does not answer within its time."""


class EngineRefused(Exception):
    """Raised when the engine answers its own warm-up with an error; the message has its words."""


class WrongAnswer(Exception):
    """Raised when the engine answers the known prompt otherwise than it did before the snapshot."""

"""Under which name an app answers right now: its own, or that of the ephemeral deployment made by
`with app.run()`."""

from __future__ import annotations

import os

APP_VARIABLE = "PILOTLIGHT_APP"
"""In a worker of an ephemeral deployment: `declared=deployed`, so that its functions call each
other and not the deployed app."""

_ephemeral: dict[str, str] = {}
"""Declared name → name of the running ephemeral deployment; changed by `start_ephemeral` and
`end_ephemeral` only, each one atomic assignment."""


def start_ephemeral(declared: str, deployed: str) -> None:
    """From now on, calls to `declared` go to `deployed`."""
    _ephemeral[declared] = deployed


def end_ephemeral(declared: str) -> None:
    """From now on, calls go to the app's own name again."""
    _ephemeral.pop(declared, None)


def is_running(declared: str) -> bool:
    """Whether an ephemeral deployment of that app is up in this process."""
    return declared in _ephemeral


def deployed_name(declared: str) -> str:
    """Where calls to the app of that name go."""
    if declared in _ephemeral:
        return _ephemeral[declared]
    name, _, deployed = os.environ.get(APP_VARIABLE, "").partition("=")
    return deployed if deployed and name == declared else declared

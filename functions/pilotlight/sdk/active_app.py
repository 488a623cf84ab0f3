"""The name that calls to an app currently use: its own, or that of the ephemeral deployment of
`with app.run()`."""

from __future__ import annotations

import os

APP_VARIABLE = "PILOTLIGHT_APP"
"""Variable in workers of an ephemeral deployment, and of an app that includes others,
`declared=deployed,…`, so that its functions call each other and not other deployments."""

_ephemeral: dict[str, str] = {}
"""Declared name → name of the running ephemeral deployment. Only changed by `start_ephemeral` and
`end_ephemeral`, each with one atomic assignment."""


def start_ephemeral(declared: str, deployed: str) -> None:
    """Direct calls to `declared` to `deployed`."""
    _ephemeral[declared] = deployed


def end_ephemeral(declared: str) -> None:
    """Direct calls to `declared` to the app of that name again."""
    _ephemeral.pop(declared, None)


_including: dict[str, str] = {}
"""Name of an app → name of the app that includes it (`App.include`). Only changed by `include`."""


def include(included: str, app: str) -> None:
    """Direct calls to `included` to `app`, which has its functions."""
    _including[included] = app


def is_running(declared: str) -> bool:
    """Whether this process runs an ephemeral deployment of the app."""
    return declared in _ephemeral


def deployed_name(declared: str) -> str:
    """Return the name of the deployment that calls to the app `declared` use."""
    for pair in os.environ.get(APP_VARIABLE, "").split(","):
        name, _, deployed = pair.partition("=")
        if deployed and name == declared:
            return deployed
    app = _including.get(declared, declared)
    return _ephemeral.get(app, app)

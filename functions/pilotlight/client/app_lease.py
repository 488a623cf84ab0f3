"""Keeps an app deployed for as long as this process lives: the app has a lease, which a thread
renews. When the process is killed the platform deletes the app."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pilotlight.client.client import Client
from pilotlight.errors import NotFound, PilotlightError

log = logging.getLogger(__name__)

LEASE_S = 120.0
"""Length of a lease: a client that stops renewing (killed, or a machine asleep) loses its app."""
RENEW_S = 20.0
JOIN_S = 5.0


class AppLease:
    """Renews the lease of one app from a daemon thread, until `close`.

    `on_lost` is called, from the thread, each time the app turns out to have been deleted after it
    was there: its lease ended, or somebody deleted it."""

    def __init__(
        self,
        client: Client,
        app: str,
        *,
        every_s: float = RENEW_S,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._app = app
        self._every_s = every_s
        self._on_lost = on_lost
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease of {app}", daemon=True)

    def start(self) -> None:
        """Begin to renew, once."""
        self._thread.start()

    def close(self) -> None:
        """Stop renewing, and wait for a renewal that has begun. Does not delete the app."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        was_there = False
        while not self._ended.wait(self._every_s):
            try:
                self._client.renew_app(self._app)
                was_there = True
            except NotFound:
                if was_there and not self._ended.is_set():
                    self._on_lost()
                was_there = False
            except PilotlightError as e:  # the platform restarts, say: try again
                log.info("event=lease_not_renewed app=%s error=%r", self._app, e)

"""Tenants' secrets, from the controller's feed: which of them a function gets.

A function gets the secrets that its spec names, of its own tenant and environment, and no others.
They are decrypted for each of its starts and kept sealed otherwise. The controller's API returns no
values (`controller.registry.secret_store`)."""

from __future__ import annotations

import json

from activator.routing.call_target import CallTarget
from pilotlight import errors
from pilotlight.core.crypto import DecryptionFailed, Sealer


class TenantSecrets:
    """Sealed secrets by `<tenant>/<environment>/<name>`. Owner: the event loop."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer
        self._sealed: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<TenantSecrets {len(self._sealed)}>"

    def put(self, path: str, sealed: str | None) -> None:
        """Apply a change of the feed; None: the secret was deleted."""
        if sealed is None:
            self._sealed.pop(path, None)
        else:
            self._sealed[path] = sealed

    def clear(self) -> None:
        """Remove all, before the feed starts again."""
        self._sealed.clear()

    def env_of(self, target: CallTarget) -> dict[str, str]:
        """Return a function's secrets as environment variables, for its next start. Raises
        Unavailable for one that is missing or cannot be decrypted."""
        values: dict[str, str] = {}
        for name in target.spec.secrets:
            sealed = self._sealed.get(f"{target.tenant}/{target.environment}/{name}")
            if sealed is None:
                raise errors.Unavailable(
                    f"secret {name!r} does not exist: `pilotlight secret set {name}` creates it",
                    retry_after_s=30,
                )
            try:
                values.update(json.loads(self._sealer.open(sealed)))
            except (DecryptionFailed, ValueError) as e:
                raise errors.Unavailable(
                    f"secret {name!r} cannot be decrypted: {e}: store its values again",
                    retry_after_s=30,
                ) from e
        return values

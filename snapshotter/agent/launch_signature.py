"""Signatures of launch documents: a pod can announce only documents that the controller wrote.

Code in a pod can reach the node agent just as its launcher can. Without a signature it could name
any bundle or weights whose digest it knows, and get them in its tenant's directory. The controller
signs each launch document with the node agents' key (HMAC-SHA256, RFC 2104), in a label of the
document; a tenant's pods can announce their tenant's documents, and no others.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from snapshotter.types import LaunchSpec

LABEL = "grant"
KEY_LABEL = b"pilotlight launch documents"


class LaunchSigner:
    """Signs and verifies launch documents. Immutable."""

    def __init__(self, key: bytes) -> None:
        """`key`: derived with KEY_LABEL from the key that controller and node agents share."""
        self._key = key

    def __repr__(self) -> str:
        return "<LaunchSigner>"

    @classmethod
    def of_raw(cls, raw: bytes) -> LaunchSigner:
        """From the decoded bytes of a key file."""
        return cls(hmac.new(raw, KEY_LABEL, hashlib.sha256).digest())

    def signed(self, launch: LaunchSpec) -> LaunchSpec:
        """The document with its signature."""
        bare = verify_launch(launch)
        return replace(bare, labels={**bare.labels, LABEL: self._sign(bare)})

    def verify(self, launch: LaunchSpec) -> bool:
        """Whether the document's signature is valid."""
        return hmac.compare_digest(
            str(launch.labels.get(LABEL, "")).encode(), self._sign(verify_launch(launch)).encode()
        )

    def _sign(self, bare: LaunchSpec) -> str:
        return hmac.new(self._key, _text(bare), hashlib.sha256).hexdigest()


def verify_launch(launch: LaunchSpec) -> LaunchSpec:
    """The document without its signature."""
    return replace(
        launch, labels={name: value for name, value in launch.labels.items() if name != LABEL}
    )


def _text(bare: LaunchSpec) -> bytes:
    """Canonical text of the document. Fields at their defaults are omitted, so that a field added
    by a newer version does not invalidate older signatures; a single kind of GPU is a string, as
    earlier versions signed it."""
    values = bare.to_json()
    values["gpu"] = bare.gpu[0] if len(bare.gpu) == 1 else bare.gpu
    defaults = {field.name: _default(field) for field in fields(bare)}
    values_set: Mapping[str, Any] = {
        name: value for name, value in values.items() if _plain(value) != defaults[name]
    }
    return json.dumps(values_set, sort_keys=True, separators=(",", ":")).encode()


def _default(field: Any) -> Any:
    if field.default_factory is not MISSING:
        return _plain(field.default_factory())
    return MISSING if field.default is MISSING else _plain(field.default)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value

"""A launch document's seal: what a pod announces is what the controller wrote, and not what code in
the pod made up.

Code in a pod can speak to the node agent as well as its launcher can. Without a seal it could name
any bundle or weights whose digest it has heard of, and find them in its tenant's directory. The
controller seals each launch document with the node agents' key (HMAC-SHA256, RFC 2104), in a label
of the document; a tenant's pods can announce their tenant's documents, and no others."""

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


class Grants:
    """Seals, and looks at seals. Immutable."""

    def __init__(self, key: bytes) -> None:
        """`key`: derived with KEY_LABEL from the key that controller and node agents share."""
        self._key = key

    def __repr__(self) -> str:
        return "<Grants>"

    @classmethod
    def of_raw(cls, raw: bytes) -> Grants:
        """Of the bytes of a key file, decoded."""
        return cls(hmac.new(raw, KEY_LABEL, hashlib.sha256).digest())

    def sealed(self, launch: LaunchSpec) -> LaunchSpec:
        """The same with its seal."""
        bare = unsealed(launch)
        return replace(bare, labels={**bare.labels, LABEL: self._seal(bare)})

    def holds(self, launch: LaunchSpec) -> bool:
        """Whether it is as it was sealed."""
        return hmac.compare_digest(
            str(launch.labels.get(LABEL, "")).encode(), self._seal(unsealed(launch)).encode()
        )

    def _seal(self, bare: LaunchSpec) -> str:
        return hmac.new(self._key, _text(bare), hashlib.sha256).hexdigest()


def unsealed(launch: LaunchSpec) -> LaunchSpec:
    """Without a seal: it is nobody's to read."""
    return replace(
        launch, labels={name: value for name, value in launch.labels.items() if name != LABEL}
    )


def _text(bare: LaunchSpec) -> bytes:
    """Fields at their defaults are left out: one that a newer version adds breaks no seal of an
    older one."""
    values = bare.to_json()
    usual = {field.name: _default(field) for field in fields(bare)}
    said: Mapping[str, Any] = {
        name: value for name, value in values.items() if _plain(value) != usual[name]
    }
    return json.dumps(said, sort_keys=True, separators=(",", ":")).encode()


def _default(field: Any) -> Any:
    if field.default_factory is not MISSING:
        return _plain(field.default_factory())
    return MISSING if field.default is MISSING else _plain(field.default)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value

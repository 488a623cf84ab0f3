"""Names, labels and annotations: which are allowed."""

from __future__ import annotations

import re
from typing import Any

Json = dict[str, Any]
_LABEL_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?\Z")
_LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?\Z")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*\Z")
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?\Z")
_KEY_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]\Z")
_RBAC_GROUP = "rbac.authorization.k8s.io"
_STRICT_1035 = {
    ("", "services"),
    ("serving.knative.dev", "services"),
    ("serving.knative.dev", "routes"),
}
_STRICT_1123 = {
    ("", "namespaces"),
    ("serving.knative.dev", "revisions"),
    ("serving.knative.dev", "configurations"),
}
_ANNOTATIONS_MAX_BYTES = 256 * 1024
_SUBDOMAIN_TEXT = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an "
    "alphanumeric character"
)


def faults(key: tuple[str, str], metadata: Json) -> list[tuple[str, str]]:
    """(path, message) of everything wrong with names and labels."""
    return (
        _name_faults(key, metadata["name"]) + _label_faults(metadata) + _annotation_faults(metadata)
    )


def _name_faults(key: tuple[str, str], name: str) -> list[tuple[str, str]]:
    where = "metadata.name"
    if key[0] == _RBAC_GROUP:
        return (
            []
            if "/" not in name and "%" not in name
            else [(where, f"Invalid value: \"{name}\": may not contain '/' or '%'")]
        )
    if key in _STRICT_1035:
        text = (
            "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start "
            "with an alphabetic character"
        )
        return (
            []
            if _LABEL_1035.match(name) and len(name) <= 63
            else [(where, f'Invalid value: "{name}": {_long(name, 63)}{text}')]
        )
    if key in _STRICT_1123:
        text = (
            "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-'"
        )
        return (
            []
            if _LABEL_1123.match(name) and len(name) <= 63
            else [(where, f'Invalid value: "{name}": {_long(name, 63)}{text}')]
        )
    good = _SUBDOMAIN.match(name) and len(name) <= 253
    return (
        [] if good else [(where, f'Invalid value: "{name}": {_long(name, 253)}{_SUBDOMAIN_TEXT}')]
    )


def _long(text: str, limit: int) -> str:
    return f"must be no more than {limit} characters, " if len(text) > limit else ""


def _is_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    return (
        bool(_KEY_NAME.match(name))
        and len(name) <= 63
        and (not slash or (bool(_SUBDOMAIN.match(prefix)) and len(prefix) <= 253))
    )


def _label_faults(metadata: Json) -> list[tuple[str, str]]:
    found = []
    for key, value in (metadata.get("labels") or {}).items():
        if not _is_key(key):
            found.append(
                (
                    "metadata.labels",
                    (
                        f'Invalid value: "{key}": name part must consist of alphanumeric '
                        f"characters, '-', '_' or '.'"
                    ),
                )
            )
        if not isinstance(value, str) or len(value) > 63 or not _LABEL_VALUE.match(value):
            text = (
                f"{_long(str(value), 63)}a valid label must be an empty string or consist of "
                f"alphanumeric characters, '-', '_' or '.'"
            )
            found.append(("metadata.labels", f'Invalid value: "{value}": {text}'))
    return found


def _annotation_faults(metadata: Json) -> list[tuple[str, str]]:
    annotations = metadata.get("annotations") or {}
    found = [
        ("metadata.annotations", f'Invalid value: "{key}": not a qualified name')
        for key in annotations
        if not _is_key(key)
    ]
    if sum(len(key) + len(value) for key, value in annotations.items()) > _ANNOTATIONS_MAX_BYTES:
        found.append(
            (
                "metadata.annotations",
                f"Too long: may not be more than {_ANNOTATIONS_MAX_BYTES} bytes",
            )
        )
    return found

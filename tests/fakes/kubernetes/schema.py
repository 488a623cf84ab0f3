"""Schemas of objects: what is a known field, and how lists and maps merge.

Built from OpenAPI documents (those of Kubernetes' own kinds come from the package
kubernetes-validate), resolved lazily: some refer to themselves. Immutable, therefore shared by all
servers of a process."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
VERSION = "v1.34.0"
_ANYTHING = "x-kubernetes-preserve-unknown-fields"
_KEY_DEFAULTS = {"protocol": "TCP"}
"""Keys of list items that may be left out, and then mean this (ports)."""


class Schema:
    """One node of a schema.

    Attributes:
        form: `object` (named fields), `map` (any keys), `list`, `scalar` or `any`.
        types: JSON types that a scalar may have.
        required: names of fields that must be there.
        list_type: `map` (items have keys), `set` or `atomic`.
        keys: fields that name an item of a `map` list.
        merge_key: key of strategic merge patches; None = the list is replaced.
        atomic: an object or map that has one owner as a whole.
        enum: allowed values; empty = all.
    """

    def __init__(self, raw: Json, definitions: Mapping[str, Json]) -> None:
        self.raw = raw = _resolved(raw, definitions)
        self._definitions = definitions
        self._known: dict[str, Schema] = {}
        kinds = _types(raw)
        self.types = frozenset(kinds)
        self.form = _form(raw, kinds)
        self.required = tuple(raw.get("required", ()))
        self.list_type = raw.get("x-kubernetes-list-type", "atomic")
        self.keys = tuple(raw.get("x-kubernetes-list-map-keys", ()))
        self.merge_key: str | None = None
        if "merge" in str(raw.get("x-kubernetes-patch-strategy", "")).split(","):
            self.merge_key = raw.get("x-kubernetes-patch-merge-key", "")
        self.atomic = raw.get("x-kubernetes-map-type") == "atomic"
        self.enum = tuple(raw.get("enum", ()))
        self.pattern: str | None = raw.get("pattern")
        self.open = bool(raw.get(_ANYTHING))
        self._fields: Mapping[str, Json] = raw.get("properties", {})

    def field(self, name: str) -> Schema | None:
        """Schema below key `name`; None = no such field here."""
        found = self._known.get(name)
        if found is not None:
            return found
        raw = self._fields.get(name)
        if raw is None:
            if self.form == "map":
                return self.values
            return ANY if self.open or self.form == "any" else None
        found = self._known[name] = Schema(raw, self._definitions)
        return found

    @functools.cached_property
    def values(self) -> Schema:
        """Schema of a map's values."""
        extra = self.raw.get("additionalProperties")
        return Schema(extra, self._definitions) if isinstance(extra, dict) else ANY

    @functools.cached_property
    def items(self) -> Schema:
        """Schema of a list's items."""
        return Schema(self.raw["items"], self._definitions) if "items" in self.raw else ANY

    def key_of(self, item: Any) -> str:
        """Path element of a list item in field sets: `k:{"name":"x"}` or `v:"x"`."""
        if self.list_type == "set" or not isinstance(item, dict):
            return "v:" + json.dumps(item, separators=(",", ":"))
        named = {key: item.get(key, _KEY_DEFAULTS.get(key)) for key in sorted(self.keys)}
        return "k:" + json.dumps(
            {k: v for k, v in named.items() if v is not None}, separators=(",", ":")
        )


def _resolved(raw: Json, definitions: Mapping[str, Json]) -> Json:
    while "$ref" in raw:
        beside = {key: value for key, value in raw.items() if key not in ("$ref", "description")}
        raw = {**definitions[raw["$ref"].rsplit("/", 1)[1]], **beside}
    return raw


def _types(raw: Json) -> list[str]:
    given = raw.get("type", [])
    found = [given] if isinstance(given, str) else list(given)
    for option in raw.get("oneOf", ()):
        found += _types(option)
    return [kind for kind in found if kind != "null"] + (
        ["string", "integer"] if raw.get("x-kubernetes-int-or-string") else []
    )


def _form(raw: Json, kinds: list[str]) -> str:
    if raw.get("properties"):
        return "object"
    if raw.get("additionalProperties"):
        return "map"
    if "array" in kinds:
        return "list"
    if raw.get(_ANYTHING) or not kinds or "object" in kinds:
        return "any"
    return "scalar"


ANY = Schema({_ANYTHING: True}, {})


@functools.cache
def definitions() -> Mapping[str, Json]:
    """All of Kubernetes' own schemas, by their full names."""
    folder = (
        importlib.resources.files("kubernetes_validate")
        / "kubernetes-json-schema"
        / f"{VERSION}-local"
    )
    document: dict[str, Json] = json.loads((folder / "_definitions.json").read_text())["$defs"]
    return document


@functools.cache
def builtin(name: str) -> Schema:
    """Schema of one of Kubernetes' own kinds: `io.k8s.api.core.v1.Pod`. Raises KeyError."""
    return Schema(definitions()[name], definitions())


@functools.cache
def metadata() -> Schema:
    """Schema of `metadata`."""
    return builtin("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta")

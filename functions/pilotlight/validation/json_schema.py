"""Validators of the JSON Schemas that tenants write. All are built here: building or using one
opens no connection and reads no file.

The library fetches what a schema names and it does not know: a custom metaschema (`$schema`, of the
document or of a part of it) and references to other documents, over HTTP or from a file. Here the
draft is passed explicitly, a `$schema` that names no draft below is refused, and a retriever that
always fails answers all that remains, `$id` included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

import jsonschema_rs

from pilotlight.errors import InvalidInput

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
"""What the SDK writes, and what a schema without `$schema` is read as."""
MAX_SHOWN = 200
MAX_PROBLEM = 500
"""Characters of an address, and of the library's message, that an error repeats: a tenant chose how
long they are."""
_DRAFTS: Final[Mapping[str, type[jsonschema_rs.Validator]]] = {
    "json-schema.org/draft/2020-12/schema": jsonschema_rs.Draft202012Validator,
    "json-schema.org/draft/2019-09/schema": jsonschema_rs.Draft201909Validator,
    "json-schema.org/draft-07/schema": jsonschema_rs.Draft7Validator,
    "json-schema.org/draft-06/schema": jsonschema_rs.Draft6Validator,
    "json-schema.org/draft-04/schema": jsonschema_rs.Draft4Validator,
}
_LINEAR: Final = jsonschema_rs.RegexOptions()
_SUPPORTED: Final = (
    f"{DIALECT} (or the metaschema of draft 2019-09, draft-07, draft-06 or draft-04)"
)
_DATA: Final = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are no schemas: a `$schema` inside them is data of the tenant's."""
_BY_NAME: Final = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)
"""Keywords whose values are schemas by a name that the tenant chose: such a name is no keyword."""


def build_validator(schema: Mapping[str, Any], where: str) -> jsonschema_rs.Validator:
    """The compiled form of a tenant's schema. Raises InvalidInput, naming `where`, for an
    unsupported `$schema` or an invalid schema."""
    return compile_schema(schema, where)[0]


def compile_schema(schema: Mapping[str, Any], where: str) -> tuple[jsonschema_rs.Validator, bool]:
    """`build_validator`, and whether all its patterns match in linear time.

    Patterns with look-around or back-references do not: the engine that knows these backtracks.
    """
    if (unsupported := _unsupported_draft(schema)) is not None:
        problem = f"$schema {unsupported[:MAX_SHOWN]!r} is not supported and is never fetched"
        raise InvalidInput(f"{where}: {problem}: remove it, or write {_SUPPORTED}", parameter=where)
    declared = schema.get("$schema")
    draft = (
        _draft(declared) if isinstance(declared, str) else None
    ) or jsonschema_rs.Draft202012Validator
    try:
        try:
            return draft(dict(schema), retriever=_refuse, pattern_options=_LINEAR), True
        except jsonschema_rs.ValidationError:  # such a pattern, or the schema is invalid
            return draft(dict(schema), retriever=_refuse), False
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as e:
        raise InvalidInput(
            f"{where}: not a JSON Schema: {str(e).splitlines()[0][:MAX_PROBLEM]}", parameter=where
        ) from e


def check_schema(schema: Mapping[str, Any]) -> None:
    """Check a schema that only others compile against its draft's metaschema. Raises ValueError.

    A `$schema` that names no supported draft is read as 2020-12; those before draft 2019-09 as
    draft-07."""
    (_OLDER if "draft-0" in str(schema.get("$schema", "")) else _NEWEST).validate(schema)


def _unsupported_draft(schema: Mapping[str, Any]) -> str | None:
    for node in _schemas(schema):
        declared = node.get("$schema")
        if isinstance(declared, str) and _draft(declared) is None:
            return declared
    return None


def _draft(declared: str) -> type[jsonschema_rs.Validator] | None:
    """The scheme and an empty fragment make no difference: both forms are in use for each draft."""
    scheme, _, name = declared.removesuffix("#").partition("://")
    return _DRAFTS.get(name) if scheme in ("http", "https") else None


def _schemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schema and every part of it that may be read as one, those under unknown keywords
    included.

    A loop, not a recursion: a tenant chose the depth.
    """
    pending: list[tuple[Any, bool]] = [(schema, False)]
    while pending:
        node, is_by_name = pending.pop()
        if isinstance(node, Mapping):
            if not is_by_name:
                yield node
            pending += [
                (child, key in _BY_NAME and not is_by_name)
                for key, child in node.items()
                if is_by_name or key not in _DATA
            ]
        elif isinstance(node, list | tuple):
            pending += [(child, False) for child in node]


def _refuse(uri: str) -> NoReturn:
    raise ValueError(f"{uri[:MAX_SHOWN]!r} is outside the schema, and is never fetched")


_NEWEST: Final = jsonschema_rs.Draft202012Validator({"$ref": DIALECT}, retriever=_refuse)
_OLDER: Final = jsonschema_rs.Draft7Validator(
    {"$ref": "http://json-schema.org/draft-07/schema#"}, retriever=_refuse
)

"""Validators for JSON Schemas from tenants. All are created by this module, which ensures that
creating or using one opens no connection and reads no file.

By default the library fetches unknown documents that a schema refers to, over HTTP or from a file:
custom metaschemas (`$schema`, of the document or a part of it) and external references. Therefore
the draft is passed explicitly, a `$schema` other than the drafts below is rejected, and a retriever
that always fails handles everything else, including `$id`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

import jsonschema_rs

from pilotlight.errors import InvalidInput

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
"""The dialect of schemas from the SDK, and of schemas without `$schema`."""
MAX_SHOWN = 200
MAX_PROBLEM = 500
"""Maximum characters of a URL, and of a message of the library, in an error: a tenant controls
their length."""
_DRAFTS: Final[Mapping[str, type[jsonschema_rs.Validator]]] = {
    "json-schema.org/draft/2020-12/schema": jsonschema_rs.Draft202012Validator,
    "json-schema.org/draft/2019-09/schema": jsonschema_rs.Draft201909Validator,
    "json-schema.org/draft-07/schema": jsonschema_rs.Draft7Validator,
    "json-schema.org/draft-06/schema": jsonschema_rs.Draft6Validator,
    "json-schema.org/draft-04/schema": jsonschema_rs.Draft4Validator,
}
Validator = jsonschema_rs.Validator
_LINEAR: Final = jsonschema_rs.RegexOptions()
_SUPPORTED: Final = (
    f"{DIALECT} (or the metaschema of draft 2019-09, draft-07, draft-06 or draft-04)"
)
_DATA: Final = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are not schemas: a `$schema` inside them is data."""
_BY_NAME: Final = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)
"""Keywords whose values map names chosen by the tenant to schemas: such names are not keywords."""


def build_validator(schema: Mapping[str, Any], where: str) -> jsonschema_rs.Validator:
    """Compile the schema of a tenant. Raises InvalidInput, naming `where`, for an unsupported
    `$schema` or an invalid schema."""
    return compile_schema(schema, where)[0]


def compile_schema(schema: Mapping[str, Any], where: str) -> tuple[jsonschema_rs.Validator, bool]:
    """Compile the schema of a tenant, like `build_validator`, and return also whether all its
    patterns match in linear time.

    Patterns with look-around or back-references do not, because they need a backtracking
    engine."""
    if (unsupported := _unsupported_draft(schema)) is not None:
        problem = f"$schema {unsupported[:MAX_SHOWN]!r} is not supported and is never fetched"
        raise InvalidInput(f"{where}: {problem}: remove it, or use {_SUPPORTED}", parameter=where)
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
    """Check a schema against the metaschema of its draft, without compiling it. Raises ValueError.

    An unsupported `$schema` is treated as 2020-12, drafts before 2019-09 as draft-07."""
    (_OLDER if "draft-0" in str(schema.get("$schema", "")) else _NEWEST).validate(schema)


def _unsupported_draft(schema: Mapping[str, Any]) -> str | None:
    for node in _schemas(schema):
        declared = node.get("$schema")
        if isinstance(declared, str) and _draft(declared) is None:
            return declared
    return None


def _draft(declared: str) -> type[jsonschema_rs.Validator] | None:
    """Return the validator class of a `$schema`, None if unsupported. The scheme and an empty
    fragment are ignored, since all forms are in use."""
    scheme, _, name = declared.removesuffix("#").partition("://")
    return _DRAFTS.get(name) if scheme in ("http", "https") else None


def _schemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the schema and every part of it that may be read as a schema, including those under
    unknown keywords.

    A loop instead of recursion, because a tenant controls the depth."""
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
    raise ValueError(f"{uri[:MAX_SHOWN]!r} is outside the schema and is never fetched")


_NEWEST: Final = jsonschema_rs.Draft202012Validator({"$ref": DIALECT}, retriever=_refuse)
_OLDER: Final = jsonschema_rs.Draft7Validator(
    {"$ref": "http://json-schema.org/draft-07/schema#"}, retriever=_refuse
)

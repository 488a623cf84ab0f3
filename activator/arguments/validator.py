"""Checks of JSON arguments against the schema of a function's method, before anything is started.

A check blocks the event loop until it ends, and a tenant controls its schema and its arguments.
`ArgumentValidator.check` therefore runs only checks whose estimated cost is within INLINE_COST, and
raises CheckTooExpensive for all others: those run in a separate process
(`activator.arguments.checker`), which can be killed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pilotlight import errors
from pilotlight.spec.function import MethodSpec
from pilotlight.validation.json_schema import compile_schema
from pilotlight.validation.schema_cost import SchemaCost, estimate_schema_cost

if TYPE_CHECKING:
    import jsonschema_rs

MAX_NAMED_PROBLEMS = 5
"""Most argument errors listed in one response."""
MAX_PROBLEM_CHARS = 500
"""Limit of one error message: it quotes the argument, which may be megabytes."""
INLINE_COST: Final = 25_000
"""Most validator visits of one check on the event loop: at most about 1 ms, mostly a tenth of
it."""
VISITS_PER_VALUE: Final = 4
"""Cost of decoding one value, in visits."""
BYTES_PER_VISIT: Final = 40
"""Bytes of text that are decoded, or matched by a pattern of weight 1, at the cost of one visit."""
MAX_INLINE_COMPILE: Final = 20_000
"""Largest weight of patterns that are compiled on the event loop: a few milliseconds, once for each
revision."""


class CheckTooExpensive(errors.InvalidInput):
    """Raised for a check that is too expensive for the event loop. Callers without a separate
    process refuse the arguments."""


class ArgumentValidator:
    """Checks JSON arguments of one method against its schema.

    Attributes:
        document: serialized form, with which another process can run the same check.
    """

    __slots__ = ("_compiled", "_cost", "_inline_bytes", "_method", "_where")

    def __init__(self, method: MethodSpec, where: str) -> None:
        """`where` names the revision in the error that `check` raises if the schema is unusable."""
        self._method = method
        self._where = where
        self._compiled: jsonschema_rs.Validator | _UnusableSchema | None = None
        self._cost = cost = (
            estimate_schema_cost(method.schema) if method.schema is not None else _NO_SCHEMA
        )
        is_inline = cost.compile_weight <= MAX_INLINE_COMPILE and cost.by_depth[0] <= INLINE_COST
        if method.schema is not None and is_inline:
            self._compiled, is_inline = _compiled(method.schema, where)
        if not is_inline:
            self._cost, self._compiled = _UNKNOWN, None
        self._inline_bytes = self._safe_bytes()

    def __repr__(self) -> str:
        return f"<ArgumentValidator {self._where}: up to {self._inline_bytes} bytes always inline>"

    @property
    def document(self) -> bytes:
        """Serialized form for another process."""
        method = self._method
        return json.dumps(
            {"schema": method.schema, "parameters": method.parameters, "where": self._where}
        ).encode()

    def check(self, body: bytes) -> None:
        """Check the arguments. Raises InvalidInput with the parameter and its problem;
        CheckTooExpensive before it runs."""
        if len(body) > self._inline_bytes:
            self._require_inexpensive(body)
        check_arguments(self._method, self._compiled, body)

    def check_fully(self, body: bytes) -> None:
        """Check the arguments whatever the cost, in a process that can be killed."""
        schema = self._method.schema
        if self._compiled is None and schema is not None:
            self._compiled, _ = _compiled(schema, self._where)
        check_arguments(self._method, self._compiled, body)

    def _safe_bytes(self) -> int:
        """Return the body size up to which any content is inexpensive: the shortest value takes two
        bytes."""
        cost = self._cost
        if cost.is_recursive:
            return 0
        per_2_bytes = (
            cost.by_depth[-1] + VISITS_PER_VALUE + 2 * (1 + cost.per_byte) / BYTES_PER_VISIT
        )
        return int(2 * INLINE_COST / per_2_bytes) - 2

    def _require_inexpensive(self, body: bytes) -> None:
        cost = self._cost
        size = len(body)
        values = 1 + body.count(b",") + body.count(b"[") + body.count(b"{")
        visits = cost.by_depth[0] if not cost.is_recursive else self._visits(body, values)
        if (
            values * (visits + VISITS_PER_VALUE) + size * (1 + cost.per_byte) // BYTES_PER_VISIT
            > INLINE_COST
        ):
            raise CheckTooExpensive("checking these arguments may take too long")

    def _visits(self, body: bytes, values: int) -> int:
        """Return the visits per value of a recursive schema, by the nesting depth of the
        arguments."""
        by_depth = self._cost.by_depth
        openings = body.count(b"[") + body.count(b"{")
        if openings < len(by_depth) - 1:
            return by_depth[openings]
        if values * VISITS_PER_VALUE + len(body) // BYTES_PER_VISIT > INLINE_COST:
            return INLINE_COST
        depth = _depth(_parsed(body), len(by_depth))
        return by_depth[depth] if depth < len(by_depth) else INLINE_COST


_NO_SCHEMA: Final = SchemaCost(by_depth=(0,), is_recursive=False, per_byte=0, compile_weight=0)
_UNKNOWN: Final = SchemaCost(
    by_depth=(INLINE_COST,), is_recursive=False, per_byte=0, compile_weight=0
)


def check_arguments(
    method: MethodSpec, validator: jsonschema_rs.Validator | _UnusableSchema | None, body: bytes
) -> None:
    """Check arguments. Raises InvalidInput with the parameter and its problem."""
    arguments = _parsed(body) if body else {}
    named = arguments if type(arguments) is dict else _by_name(method, arguments)
    try:
        if validator is None or validator.is_valid(named):
            return
        problems = _problems(method, validator, named)
    except ValueError as e:  # for example half a surrogate pair in a name
        raise errors.InvalidInput(f"the arguments cannot be checked: {e}") from e
    first = problems[0]
    what = f"argument {first['parameter']!r}: " if first["parameter"] else ""
    raise errors.InvalidInput(
        f"{what}{first['message']}", parameter=first["parameter"], errors=problems
    )


def _problems(
    method: MethodSpec,
    validator: jsonschema_rs.Validator | _UnusableSchema,
    named: Mapping[str, Any],
) -> list[dict[str, str]]:
    found = itertools.islice(validator.iter_errors(named), MAX_NAMED_PROBLEMS)
    return [
        {"parameter": _shortened(_parameter(e)), "message": _shortened(_problem(method, e))}
        for e in found
    ]


def _by_name(method: MethodSpec, arguments: Any) -> Mapping[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, list):
        raise errors.InvalidInput(
            f"the body must be a JSON object of arguments by name, or an array of them in order; "
            f"got {type(arguments).__name__}"
        )
    names = method.parameters
    if len(arguments) > len(names) and method.schema is not None:
        raise errors.InvalidInput(
            f"{len(arguments)} positional arguments given, at most {len(names)} accepted"
        )
    return dict(zip(names, arguments, strict=False))


def _compiled(
    schema: Mapping[str, Any], where: str
) -> tuple[jsonschema_rs.Validator | _UnusableSchema, bool]:
    """Return the validator, and whether its patterns match in linear time."""
    try:
        return compile_schema(schema, where)
    except errors.InvalidInput as e:
        return _UnusableSchema(str(e)), True


class _UnusableSchema:
    """Replaces the validator of a schema that was stored before such schemas were refused at
    deploy: refuses all arguments."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def is_valid(self, named: Mapping[str, Any]) -> NoReturn:
        """Raises InvalidInput."""
        raise errors.InvalidInput(
            f"the arguments cannot be checked: {self._problem}; then deploy the function again"
        )

    iter_errors = is_valid


_decode_at_once = json.JSONDecoder().raw_decode


def _parsed(body: bytes) -> Any:
    try:
        text = body.decode()
        if text[0] in "{[":
            # like `json.loads`, but without skipping white space around the value
            value, end = _decode_at_once(text)
            if end == len(text):
                return value
        return json.loads(text)
    except ValueError as e:  # UnicodeDecodeError is one
        raise errors.InvalidInput(f"the body is not valid JSON: {e}") from e
    except RecursionError as e:
        raise errors.InvalidInput("the body is nested too deeply") from e


def _depth(value: Any, most: int) -> int:
    """Return the nesting depth of a value, up to `most`."""
    depth, level = 0, [value]
    while depth < most:
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if type(node) is dict else node)
        ]
        if not level:
            return depth
        depth += 1
    return most


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_PROBLEM_CHARS else text[:MAX_PROBLEM_CHARS] + "…"


def _parameter(error: jsonschema_rs.ValidationError) -> str:
    if error.instance_path:
        return str(error.instance_path[0])
    kind = error.kind
    named = getattr(kind, "property", None) or next(iter(getattr(kind, "unexpected", ())), "")
    return str(named)


def _problem(method: MethodSpec, error: jsonschema_rs.ValidationError) -> str:
    """The message; in terms of parameters where the schema speaks of properties."""
    if not error.instance_path:
        if getattr(error.kind, "property", None):
            return "is required"
        if getattr(error.kind, "unexpected", None):
            known = ", ".join(method.parameters)
            return f"there is no such parameter; the parameters are: {known or 'none'}"
    return str(error.message)

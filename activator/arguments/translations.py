"""Translates requests and answers of model servers' protocols to arguments and values of functions,
and back. Pure.

For a large body this takes a tenth of a second and more, during which no other Python code of the
process runs; `ArgumentChecker.translate` runs it in a separate process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from activator.arguments import tensors
from pilotlight import errors
from pilotlight.spec.function import MethodSpec
from pilotlight.validation.json_size import require_few_values

MAX_VALUES = 500_000
"""Maximum values of a body or an answer (`json_size`), more than an image of 224 x 224 x 3 as
nested lists: translating a number takes up to two microseconds."""
SMALL_BYTES = 16 * 1024
"""Size up to which translation takes at most two milliseconds: sending it to another process would
take longer."""
TRANSLATION_S = 30.0
"""Timeout: the permitted maximum takes a second or two of a processor, and more on a loaded
machine."""
Asked = Mapping[str, Any]
"""What to translate: the result of `translation_of`, and `memo`, the part of the request that its
answer needs."""


def translation_of(verb: str, model: str, spec: MethodSpec, *, revision: str) -> Asked:
    """The translation of a call: `infer` or `predict`."""
    return {
        "verb": verb,
        "model": model,
        "parameters": spec.parameters,
        "schema": spec.schema,
        "revision": revision,
        "memo": None,
    }


def translated(asked: Asked, body: bytes, *, is_answer: bool) -> tuple[Any, bytes]:
    """The memo, and a call's arguments or an answer's body as JSON. Raises InvalidInput,
    TooLarge."""
    spec = MethodSpec(parameters=tuple(asked["parameters"]), schema=asked["schema"])
    conversation = (
        Infer(asked["model"], spec, asked["memo"]) if asked["verb"] == "infer" else Predict(spec)
    )
    value = parsed(body)
    result = (
        conversation.answer(value, revision=asked["revision"])
        if is_answer
        else conversation.arguments(value)
    )
    return conversation.memo, json.dumps(result).encode()


class Predict:
    """`{"instances": […]}` → `{"predictions": […]}`.

    A function with a parameter `instances`, or with a single one that takes a list, gets all
    instances in one call. Any other takes one instance: an object of its arguments, or the value of
    its only one."""

    memo = None

    def __init__(self, spec: MethodSpec) -> None:
        self._spec = spec
        self._names = names(spec)
        self._batch = "instances" if "instances" in self._names else self._list_parameter()

    def arguments(self, body: Any) -> Any:
        """The call's arguments. Raises InvalidInput."""
        if (
            not isinstance(body, dict)
            or set(body) - {"instances"}
            or not isinstance(body.get("instances"), list)
            or not body["instances"]
        ):
            raise errors.InvalidInput(
                'the body must be {"instances": […]} with at least one instance',
                parameter="instances",
            )
        instances = body["instances"]
        if self._batch is not None:
            return {self._batch: instances}
        if len(instances) != 1:
            how = "send one, or declare its parameter as instances: list[…]"
            raise errors.InvalidInput(
                f"the function takes one instance at a time, not {len(instances)}: {how}",
                parameter="instances",
            )
        (only,) = instances
        is_named = isinstance(only, dict) and (
            len(self._names) != 1 or set(only) <= set(self._names)
        )
        return only if is_named else {self._names[0]: only} if len(self._names) == 1 else [only]

    def answer(self, value: Any, *, revision: str) -> dict[str, Any]:
        """The answer's body."""
        if (
            isinstance(value, dict)
            and set(value) == {"predictions"}
            and isinstance(value["predictions"], list)
        ):
            return value
        return {
            "predictions": value if self._batch is not None and isinstance(value, list) else [value]
        }

    def _list_parameter(self) -> str | None:
        if len(self._names) != 1:
            return None
        schema = properties(self._spec).get(self._names[0], {})
        return self._names[0] if not schema or schema.get("type") == "array" else None


class Infer:
    """Input tensors → arguments by name; the answer → output tensors."""

    def __init__(self, model: str, spec: MethodSpec, memo: Any) -> None:
        """`memo`: of the same exchange, once its arguments were translated."""
        self._model = model
        self._spec = spec
        self._id: str | None
        self._wanted: list[str] | None
        self._id, self._wanted = memo or (None, None)

    @property
    def memo(self) -> Any:
        """The request's id, and its requested outputs."""
        return [self._id, self._wanted]

    def arguments(self, body: Any) -> Any:
        """The call's arguments. Raises InvalidInput."""
        if (
            not isinstance(body, dict)
            or not isinstance(body.get("inputs"), list)
            or not body["inputs"]
        ):
            raise errors.InvalidInput(
                'the body must be an inference request: {"inputs": [{"name", "shape", "datatype", '
                '"data"}]}'
            )
        if body.get("id") is not None:
            self._id = str(body["id"])
        self._wanted = _wanted(body.get("outputs"))
        given: dict[str, Any] = {}
        tensors.require_few_elements(body["inputs"])
        for name, value in map(tensors.value_of, body["inputs"]):
            if name in given:
                raise errors.InvalidInput(f"duplicate input name {name[:80]!r}", parameter="inputs")
            given[name] = self._fitting(name, value)
        if "parameters" in names(self._spec) and isinstance(body.get("parameters"), dict):
            given.setdefault("parameters", body["parameters"])
        return given

    def answer(self, value: Any, *, revision: str) -> dict[str, Any]:
        """The answer's body. Raises InvalidInput for an unknown output."""
        outputs = {tensor["name"]: tensor for tensor in tensors.tensors_of(value)}
        for name in self._wanted or ():
            if name not in outputs:
                raise errors.InvalidInput(
                    f"there is no output {name[:80]!r}: available are {', '.join(outputs)}",
                    parameter="outputs",
                )
        chosen = (
            [outputs[name] for name in self._wanted]
            if self._wanted is not None
            else list(outputs.values())
        )
        named = {"model_name": self._model, "model_version": revision}
        return {**named, **({"id": self._id} if self._id is not None else {}), "outputs": chosen}

    def _fitting(self, name: str, value: Any) -> Any:
        """Unwrap a tensor of one element if the argument is a single value."""
        if not tensors.is_scalar(properties(self._spec).get(name)):
            return value
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
        return value


def parsed(body: bytes) -> Any:
    """Parse a body of limited size. Raises TooLarge, InvalidInput."""
    require_few_values(
        body,
        MAX_VALUES,
        "call the function by its own name, where nothing is translated",
    )
    try:
        return json.loads(body.decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise errors.InvalidInput(f"the body is not valid JSON: {e}") from e


def _wanted(outputs: Any) -> list[str] | None:
    if outputs is None:
        return None
    if not isinstance(outputs, list) or not all(
        isinstance(one, dict) and isinstance(one.get("name"), str) for one in outputs
    ):
        raise errors.InvalidInput('outputs: write [{"name": …}]', parameter="outputs")
    return [one["name"] for one in outputs] or None


def properties(spec: MethodSpec) -> Mapping[str, Any]:
    """Schemas of its arguments, by name."""
    found = (spec.schema or {}).get("properties", {})
    return found if isinstance(found, Mapping) else {}


def names(spec: MethodSpec) -> list[str]:
    """Names of its arguments."""
    return list(dict.fromkeys((*spec.parameters, *properties(spec))))

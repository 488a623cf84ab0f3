"""Translates requests and answers of model servers' protocols to arguments and values of functions,
and back. Pure.

For a large body this takes a tenth of a second and more, during which no other Python code of the
process runs; `ArgumentChecker.translate` runs it in a separate process."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from activator.arguments import tensors
from pilotlight import errors
from pilotlight.core.binary_tensors import (
    Buffer,
    InvalidTensor,
    Tensor,
    pack,
    texts_bytes,
    unpack,
)
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
MAX_TENSORS: Final = 256
"""Most inputs, and most requested outputs, of a call."""
_NO_DATA: Final = memoryview(b"")
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
        "head_bytes": None,
        "is_packed": False,
    }


class TooSlow(Exception):
    """Raised for a translation that takes too long for the event loop."""


class Translated(NamedTuple):
    """A translated body.

    Attributes:
        memo: of a request, what the translation of its answer needs.
        is_packed: of a request: it is no JSON, but CONTENT_TENSORS.
        wants_tensors: of a request: its answer should be CONTENT_TENSORS.
        head_bytes: of an answer: size of the JSON, which data follow; 0 = all of it is JSON.
    """

    body: bytes
    memo: Any = None
    is_packed: bool = False
    wants_tensors: bool = False
    head_bytes: int = 0


def translated(
    asked: Asked, body: bytes, *, is_answer: bool, inline_bytes: float = math.inf
) -> Translated:
    """Translate a call's arguments, or an answer. Raises InvalidInput, TooLarge, and TooSlow where
    more than `inline_bytes` have to become JSON values."""
    spec = MethodSpec(parameters=tuple(asked["parameters"]), schema=asked["schema"])
    if asked["verb"] != "infer":
        predict, value = Predict(spec), parsed(body)
        result = (
            predict.answer(value, revision=asked["revision"])
            if is_answer
            else predict.arguments(value)
        )
        return Translated(json.dumps(result).encode())
    infer = Infer(asked["model"], spec, asked["memo"])
    if is_answer:
        return _answer(infer, asked, body, inline_bytes)
    return _request(infer, body, asked["head_bytes"], inline_bytes)


def _request(infer: Infer, body: bytes, head_bytes: int | None, inline_bytes: float) -> Translated:
    """`head_bytes`: size of the JSON that data follow; None = all is JSON."""
    if head_bytes is None:
        head, data = body, _NO_DATA
    elif not 0 < head_bytes <= len(body):
        raise errors.InvalidInput(
            f"header inference-header-content-length = {head_bytes}: must be from 1 to the size of "
            f"the body, {len(body)}",
            parameter="inference-header-content-length",
        )
    else:
        head, data = body[:head_bytes], memoryview(body)[head_bytes:]
    if len(head) > inline_bytes:
        raise TooSlow
    values, packed = infer.arguments(parsed(head), data, inline_bytes)
    text = json.dumps(values).encode()
    return Translated(
        pack(text, packed) if packed else text,
        memo=infer.memo,
        is_packed=bool(packed),
        wants_tensors=infer.wants_binary,
    )


def _answer(infer: Infer, asked: Asked, body: bytes, inline_bytes: float) -> Translated:
    packed: list[Tensor] = []
    if asked["is_packed"]:
        try:
            if texts_bytes(body) > inline_bytes:
                raise TooSlow
            body, packed = unpack(body)
        except InvalidTensor as e:
            raise errors.InvalidInput(f"the worker's answer is not valid: {e}") from e
    elif len(body) > inline_bytes:
        raise TooSlow
    document, parts = infer.answer(parsed(body), packed, inline_bytes, revision=asked["revision"])
    head = json.dumps(document).encode()
    if not parts:
        return Translated(head)
    return Translated(b"".join((head, *parts)), head_bytes=len(head))


class Predict:
    """`{"instances": […]}` → `{"predictions": […]}`.

    A function with a parameter `instances`, or with a single one that takes a list, gets all
    instances in one call. Any other takes one instance: an object of its arguments, or the value of
    its only one."""

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
    """Input tensors → arguments by name; the answer → output tensors.

    Tensors whose data follow the JSON, and those of parameters that take arrays, are passed on as
    bytes (`core.binary_tensors`) to parameters that take arrays or bytes, and as JSON to others."""

    def __init__(self, model: str, spec: MethodSpec, memo: Any) -> None:
        """`memo`: of the same exchange, once its arguments were translated."""
        self._model = model
        self._spec = spec
        self._schemas = properties(spec)
        self._id: str | None
        self._wanted: list[tuple[str, bool]] | None
        self._is_binary: bool
        self._id, self._wanted, self._is_binary = memo or (None, None, False)

    @property
    def memo(self) -> Any:
        """The request's id, its requested outputs, each with whether it is binary, and whether
        others are."""
        return [self._id, self._wanted, self._is_binary]

    def arguments(
        self, body: Any, data: memoryview = _NO_DATA, inline_bytes: float = math.inf
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """The call's arguments, None for each tensor, and the tensors. `data`: what follows the
        JSON. Raises InvalidInput, and TooSlow for more than `inline_bytes` that become JSON."""
        inputs = self._inputs(body)
        self._read_outputs(body)
        kinds = [tensors.kind_of(self._schemas.get(given.name)) for given in inputs]
        tensors.require_few_lists(
            given.shape for given, kind in zip(inputs, kinds, strict=True) if not kind
        )
        named: dict[str, Any] = {}
        packed: list[Tensor] = []
        at = 0
        for given, kind in zip(inputs, kinds, strict=True):
            if given.name in named:
                raise errors.InvalidInput(
                    f"duplicate input name {given.name[:80]!r}", parameter="inputs"
                )
            part = data[at : at + given.binary_bytes]
            at += given.binary_bytes
            is_binary = given.data is None
            if is_binary and len(part) != given.binary_bytes:
                raise errors.InvalidInput(
                    f"input {given.name[:80]!r}: binary_data_size = {given.binary_bytes}: only "
                    f"{len(part)} bytes follow",
                    parameter="inputs",
                )
            named[given.name] = None
            if kind == "array":
                packed.append(given.tensor(part) if is_binary else given.encoded())
            elif kind and is_binary:
                packed.append(given.single(part))
            elif is_binary:
                inline_bytes -= len(part)
                if inline_bytes < 0:
                    raise TooSlow
                named[given.name] = self._fitting(given.name, given.decoded(part))
            else:
                named[given.name] = self._fitting(given.name, given.value())
        if at != len(data):
            raise errors.InvalidInput(
                f"{len(data) - at} bytes follow the data of the inputs: send the exact "
                f"binary_data_size of each",
                parameter="inputs",
            )
        if "parameters" in names(self._spec) and isinstance(body.get("parameters"), dict):
            named.setdefault("parameters", body["parameters"])
        return named, packed

    def _inputs(self, body: Any) -> list[tensors.Input]:
        if (
            not isinstance(body, dict)
            or not isinstance(body.get("inputs"), list)
            or not body["inputs"]
        ):
            raise errors.InvalidInput(
                'the body must be an inference request: {"inputs": [{"name", "shape", "datatype", '
                '"data"}]}'
            )
        if len(body["inputs"]) > MAX_TENSORS:
            raise errors.InvalidInput(
                f"inputs: {len(body['inputs'])} tensors, at most {MAX_TENSORS}", parameter="inputs"
            )
        return list(map(tensors.input_of, body["inputs"]))

    def _read_outputs(self, body: Mapping[str, Any]) -> None:
        if body.get("id") is not None:
            self._id = str(body["id"])
        parameters = body.get("parameters")
        if isinstance(parameters, dict):
            self._is_binary = parameters.get("binary_data_output") is True
        self._wanted = _wanted(body.get("outputs"), self._is_binary)

    @property
    def wants_binary(self) -> bool:
        """Whether an output is to be binary."""
        if self._wanted is None:
            return self._is_binary
        return any(is_binary for _, is_binary in self._wanted)

    def answer(
        self,
        value: Any,
        packed: Sequence[Tensor] = (),
        inline_bytes: float = math.inf,
        *,
        revision: str,
    ) -> tuple[dict[str, Any], list[Buffer]]:
        """The answer's JSON, and the data that follows it. `packed`: members of `value` that are
        tensors. Raises InvalidInput for an unknown output, and TooSlow for more than `inline_bytes`
        that become JSON."""
        found = {tensor.name: tensor for tensor in packed}
        values = value if isinstance(value, dict) and value else {"output": value}
        wanted = self._wanted
        if wanted is None:
            wanted = [(name, self._is_binary) for name in values]
        outputs: list[dict[str, Any]] = []
        parts: list[Buffer] = []
        for name, is_binary in wanted:
            if name not in values:
                raise errors.InvalidInput(
                    f"there is no output {name[:80]!r}: available are {', '.join(values)}",
                    parameter="outputs",
                )
            tensor = found.get(name)
            if tensor is not None and not is_binary:
                inline_bytes -= len(tensor.data)
                if inline_bytes < 0:
                    raise TooSlow
            output = (
                tensors.tensor_of(name, values[name])
                if tensor is None
                else tensors.output_of(tensor, is_binary=is_binary)
            )
            if is_binary:
                data = tensor.data if tensor is not None else tensors.take_data(output)
                output.setdefault("parameters", {})["binary_data_size"] = len(data)
                parts.append(data)
            outputs.append(output)
        named = {"model_name": self._model, "model_version": revision}
        document = {
            **named,
            **({"id": self._id} if self._id is not None else {}),
            "outputs": outputs,
        }
        return document, parts

    def _fitting(self, name: str, value: Any) -> Any:
        """Unwrap a tensor of one element if the argument is a single value."""
        if not tensors.is_scalar(self._schemas.get(name)):
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


def _wanted(outputs: Any, is_binary: bool) -> list[tuple[str, bool]] | None:
    if outputs is None:
        return None
    if not isinstance(outputs, list) or not all(
        isinstance(one, dict) and isinstance(one.get("name"), str) for one in outputs
    ):
        raise errors.InvalidInput('outputs: write [{"name": …}]', parameter="outputs")
    if len(outputs) > MAX_TENSORS:
        raise errors.InvalidInput(
            f"outputs: {len(outputs)} tensors, at most {MAX_TENSORS}", parameter="outputs"
        )
    return [(one["name"], _is_binary(one, is_binary)) for one in outputs] or None


def _is_binary(output: Mapping[str, Any], is_binary: bool) -> bool:
    parameters = output.get("parameters")
    if not isinstance(parameters, Mapping):
        return is_binary
    for refused in ("classification", "shared_memory_region"):
        if parameters.get(refused):
            raise errors.InvalidInput(
                f"output {output['name'][:80]!r}: {refused} is not supported: omit it",
                parameter="outputs",
            )
    return parameters.get("binary_data", is_binary) is True


def properties(spec: MethodSpec) -> Mapping[str, Any]:
    """Schemas of its arguments, by name."""
    found = (spec.schema or {}).get("properties", {})
    return found if isinstance(found, Mapping) else {}


def names(spec: MethodSpec) -> list[str]:
    """Names of its arguments."""
    return list(dict.fromkeys((*spec.parameters, *properties(spec))))


def for_tensors(spec: MethodSpec) -> MethodSpec:
    """Return a method whose parameters for arrays and bytes accept any value: their tensors are in
    no JSON that could be checked."""
    if spec.schema is None:
        return spec
    loose = {
        name: {} if tensors.kind_of(schema) else schema for name, schema in properties(spec).items()
    }
    return replace(spec, schema={**spec.schema, "properties": loose})

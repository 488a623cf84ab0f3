"""Translates messages of the gRPC service to requests of the protocol over HTTP with binary tensor
data, and its answers back. Pure.

A message is a hundred times its size in memory where it consists of empty parts, so the parts that
are no raw tensor data are counted before it is parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from activator.open_inference.grpc.messages import message_class
from pilotlight.core.binary_tensors import InvalidTensor, encode

MAX_FIELDS: Final = 1024
"""Most inputs, outputs, parameters and raw contents of a request together."""
MAX_TYPED_BYTES: Final = 4 * 1024 * 1024
"""Most bytes of a request that are no raw contents: 250,000 elements of any type, and names."""
MAX_ELEMENTS: Final = 250_000
"""Most elements of a tensor with typed contents."""
_RAW_CONTENTS: Final = 7
_CONTENTS: Final = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_OF_BINARY_DATA: Final = frozenset({"binary_data", "binary_data_size", "binary_data_output"})
_MODEL: Final = re.compile(r"[^/\x00-\x20\x7f]{1,200}/[^/\x00-\x20\x7f]{1,200}")
_VERSION: Final = re.compile(r"[^/\x00-\x20\x7f]{1,200}")


class InvalidMessage(ValueError):
    """Raised for a message that is not valid, or exceeds a bound, which the text names."""


def model_path(name: str, version: str) -> str:
    """Return the path of a model, below which its verbs are. Raises InvalidMessage."""
    if not _MODEL.fullmatch(name):
        raise InvalidMessage(f"model name {name[:80]!r}: must be app/function")
    if not version:
        return f"/v2/models/{quote(name, safe='/@')}"
    if not _VERSION.fullmatch(version):
        raise InvalidMessage(f"model version {version[:80]!r}: must be a revision, alias or tag")
    return f"/v2/models/{quote(name, safe='/@')}/versions/{quote(version, safe='')}"


def parse_infer(data: bytes) -> Any:
    """Parse a ModelInferRequest. Raises InvalidMessage."""
    _check_parts(data)
    return parse("ModelInferRequest", data)


def parse(name: str, data: bytes) -> Any:
    """Parse a message that has no repeated parts. Raises InvalidMessage."""
    from google.protobuf.message import DecodeError

    try:
        return message_class(name).FromString(data)
    except DecodeError as e:
        raise InvalidMessage(f"the message is no {name}: {e}") from e


def _check_parts(data: bytes) -> None:
    """Count the fields of a message, and their bytes but raw contents. Raises InvalidMessage."""
    at, fields, typed = 0, 0, 0
    while at < len(data):
        start = at
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 2:
            length, at = _varint(data, at)
            at += length
        elif kind == 0:
            _, at = _varint(data, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise InvalidMessage("the message is no ModelInferRequest: it has a group")
        fields += 1
        typed += at - start if key >> 3 != _RAW_CONTENTS else 0
        if fields > MAX_FIELDS:
            raise InvalidMessage(
                f"the request has more than {MAX_FIELDS} inputs, outputs and parameters"
            )
        if typed > MAX_TYPED_BYTES:
            raise InvalidMessage(
                f"the request has more than {MAX_TYPED_BYTES} bytes beside raw_input_contents: "
                f"send tensors there"
            )


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise InvalidMessage("the message is no ModelInferRequest: it is cut off")


# -- requests --------------------------------------------------------------------------------------
def http_body(request: Any) -> tuple[int, bytes]:
    """Return the size of the JSON of a request over HTTP, and its body. Raises InvalidMessage."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidMessage(
            f"raw_input_contents has {len(raw)} entries: must have one for each of the "
            f"{len(request.inputs)} inputs"
        )
    parts = [b""]
    inputs = []
    for number, given in enumerate(request.inputs):
        if raw and given.HasField("contents"):
            raise InvalidMessage(
                f"input {given.name[:80]!r}: has contents beside raw_input_contents: send one"
            )
        data = raw[number] if raw else _typed(given)
        parts.append(data)
        inputs.append(
            {
                "name": given.name,
                "datatype": given.datatype,
                "shape": list(given.shape),
                "parameters": {**_values(given.parameters), "binary_data_size": len(data)},
            }
        )
    document: dict[str, Any] = {
        "parameters": {**_values(request.parameters), "binary_data_output": True},
        "inputs": inputs,
    }
    if request.id:
        document["id"] = request.id
    if request.outputs:
        document["outputs"] = [
            {"name": one.name, "parameters": {**_values(one.parameters), "binary_data": True}}
            for one in request.outputs
        ]
    parts[0] = json.dumps(document).encode()
    return len(parts[0]), b"".join(parts)


def _typed(given: Any) -> bytes:
    field = _CONTENTS.get(given.datatype)
    where = f"input {given.name[:80]!r}"
    if field is None:
        raise InvalidMessage(f"{where}: {given.datatype[:20]!r} must be in raw_input_contents")
    elements = getattr(given.contents, field)
    if len(elements) > MAX_ELEMENTS:
        raise InvalidMessage(
            f"{where}: {field} has {len(elements)} elements, at most {MAX_ELEMENTS}: send them in "
            f"raw_input_contents"
        )
    try:
        return encode(given.datatype, list(elements))
    except InvalidTensor as e:
        raise InvalidMessage(f"{where}: {e}") from e


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as JSON values, without those that say where data is."""
    found = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is not None and name not in _OF_BINARY_DATA:
            found[name] = getattr(parameter, choice)
    return found


# -- answers ---------------------------------------------------------------------------------------
def infer_response(body: bytes, head_bytes: int) -> Any:
    """Return the message of an answer over HTTP. `head_bytes`: size of its JSON. Raises KeyError,
    TypeError, ValueError for an answer that is none."""
    document = json.loads(body[:head_bytes])
    response = message_class("ModelInferResponse")(
        model_name=document["model_name"],
        model_version=document["model_version"],
        id=document.get("id", ""),
    )
    data, at = memoryview(body)[head_bytes:], 0
    for output in document["outputs"]:
        parameters = output.get("parameters", {})
        tensor = response.outputs.add(
            name=output["name"], datatype=output["datatype"], shape=output["shape"]
        )
        for name, value in parameters.items():
            if name not in _OF_BINARY_DATA:
                tensor.parameters[name].string_param = str(value)
        end = at + parameters["binary_data_size"]
        response.raw_output_contents.append(bytes(data[at:end]))
        at = end
    return response


def metadata_response(document: Mapping[str, Any]) -> Any:
    """Return the message of a model's metadata over HTTP."""
    return message_class("ModelMetadataResponse")(
        name=document["name"],
        versions=document["versions"],
        platform=document["platform"],
        inputs=document["inputs"],
        outputs=document["outputs"],
    )

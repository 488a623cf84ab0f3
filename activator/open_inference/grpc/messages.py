"""The messages of `inference.GRPCInferenceService`, the gRPC service of the Open Inference Protocol
(version 2), and those of `google.rpc` that tell clients when to try again.

Classes are created from the tables below at run time, in a pool of their own: generated code would
be registered in the process's only pool, as that of the protocol's clients is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

SERVICE: Final = "inference.GRPCInferenceService"
_SCALARS: Final = {
    "bool": Field.TYPE_BOOL,
    "int32": Field.TYPE_INT32,
    "int64": Field.TYPE_INT64,
    "uint32": Field.TYPE_UINT32,
    "uint64": Field.TYPE_UINT64,
    "float": Field.TYPE_FLOAT,
    "double": Field.TYPE_DOUBLE,
    "string": Field.TYPE_STRING,
    "bytes": Field.TYPE_BYTES,
}
_TENSOR: Final = ("name string", "datatype string", "shape int64*", "parameters {InferParameter}")
_INFERENCE: Final[Mapping[str, tuple[str, ...]]] = {
    "ServerLiveRequest": (),
    "ServerLiveResponse": ("live bool",),
    "ServerReadyRequest": (),
    "ServerReadyResponse": ("ready bool",),
    "ModelReadyRequest": ("name string", "version string"),
    "ModelReadyResponse": ("ready bool",),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": ("name string", "version string", "extensions string*"),
    "ModelMetadataRequest": ("name string", "version string"),
    "TensorMetadata": ("name string", "datatype string", "shape int64*"),
    "ModelMetadataResponse": (
        "name string",
        "versions string*",
        "platform string",
        "inputs TensorMetadata*",
        "outputs TensorMetadata*",
    ),
    "InferParameter": (
        "bool_param bool|",
        "int64_param int64|",
        "string_param string|",
        "double_param double|",
        "uint64_param uint64|",
    ),
    "InferTensorContents": (
        "bool_contents bool*",
        "int_contents int32*",
        "int64_contents int64*",
        "uint_contents uint32*",
        "uint64_contents uint64*",
        "fp32_contents float*",
        "fp64_contents double*",
        "bytes_contents bytes*",
    ),
    "InferInputTensor": (*_TENSOR, "contents InferTensorContents"),
    "InferRequestedOutputTensor": ("name string", "parameters {InferParameter}"),
    "ModelInferRequest": (
        "model_name string",
        "model_version string",
        "id string",
        "parameters {InferParameter}",
        "inputs InferInputTensor*",
        "outputs InferRequestedOutputTensor*",
        "raw_input_contents bytes*",
    ),
    "InferOutputTensor": (*_TENSOR, "contents InferTensorContents"),
    "ModelInferResponse": (
        "model_name string",
        "model_version string",
        "id string",
        "parameters {InferParameter}",
        "outputs InferOutputTensor*",
        "raw_output_contents bytes*",
    ),
}
"""Messages by name, with their fields in the order of their numbers, from 1: `*` marks repeated
ones, `{…}` maps from text, `|` the choices of a oneof. Nested messages of the protocol stand beside
the others, which is the same on the wire."""
_RPC: Final[Mapping[str, tuple[str, ...]]] = {
    "Duration": ("seconds int64", "nanos int32"),
    "RetryInfo": ("retry_delay Duration",),
    "Any": ("type_url string", "value bytes"),
    "Status": ("code int32", "message string", "details Any*"),
}
"""`google.rpc.Status` and what it has in it, as they are on the wire."""


def _file(package: str, messages: Mapping[str, tuple[str, ...]]) -> Any:
    """Return the description of a package of messages."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}.proto", package=package, syntax="proto3"
    )
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for number, text in enumerate(fields, 1):
            _add_field(message, package, number, *text.split())
    return file


def _add_field(message: Any, package: str, number: int, name: str, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=Field.LABEL_OPTIONAL)
    if kind.endswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index, kind = 0, kind[:-1]
    elif kind.endswith("*"):
        field.label, kind = Field.LABEL_REPEATED, kind[:-1]
    elif kind.startswith("{"):
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _add_field(entry, package, 1, "key", "string")
        _add_field(entry, package, 2, "value", kind[1:-1])
        field.label, field.type = Field.LABEL_REPEATED, Field.TYPE_MESSAGE
        field.type_name = f".{package}.{message.name}.{entry.name}"
        return
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = Field.TYPE_MESSAGE, f".{package}.{kind}"


_POOL: Final = descriptor_pool.DescriptorPool()
_CLASSES: dict[str, Any] = {}
for _package, _messages in (("inference", _INFERENCE), ("pilotlight.rpc", _RPC)):
    _POOL.AddSerializedFile(_file(_package, _messages).SerializeToString())
    for _name in _messages:
        _CLASSES[_name] = message_factory.GetMessageClass(
            _POOL.FindMessageTypeByName(f"{_package}.{_name}")
        )


def message_class(name: str) -> Any:
    """Return the class of a message."""
    return _CLASSES[name]

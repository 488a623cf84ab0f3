"""The OpenAPI description of requests to sandboxes, which activators pass to their workers
(`activator.async_calls.sandboxes`)."""

from __future__ import annotations

from typing import Any

from pilotlight.controller.server.openapi_parts import (
    BINARY,
    environment,
    in_path,
    in_query,
    json_body,
    json_response,
    operation,
)
from pilotlight.protocol import CONTENT_BYTES
from pilotlight.spec.sandboxes import FILE_PIECE_BYTES, WAIT_S

_BYTES = {CONTENT_BYTES: BINARY}
_NUMBER = {"type": "integer", "minimum": 0}
_FLAG = {"type": "string", "enum": ["0", "1"], "default": "0"}
_OUTPUT: dict[str, Any] = {
    "type": "object",
    "required": ["process", "stdout", "stderr", "returncode", "is_ended"],
    "properties": {
        "process": {"type": "integer"},
        "stdout": {"type": "string", "description": "base64 of what follows the offset"},
        "stderr": {"type": "string", "description": "base64 of what follows the offset"},
        "returncode": {
            "type": ["integer", "null"],
            "description": "null while it runs; 128 + the signal; 124 after its timeout",
        },
        "is_ended": {"type": "boolean", "description": "nothing follows this output"},
    },
}
_NOTHING = {"200": json_response("done", {"type": "object"})}


def sandbox_paths() -> dict[str, dict[str, Any]]:
    """The paths, with their operations."""
    sandbox = [in_path("sandbox", "the id of the sandbox, that of its call"), environment()]
    process = [*sandbox, in_path("process", "the number of the command; 0: the sandbox's own")]
    path = in_query(
        "path", "absolute, or below the working directory", {"type": "string"}, required=True
    )
    base = "/v1/sandboxes/{sandbox}"
    execute = operation(
        "sandbox_exec",
        "Execute a command. The answer has its whole output if it ends within some milliseconds.",
        sandbox,
        {"200": json_response("the command", _OUTPUT)},
        json_body(
            "the command",
            {
                "workdir": {"type": "string"},
                "env": {"type": "object", "additionalProperties": {"type": "string"}},
                "timeout_s": {"type": "number", "exclusiveMinimum": 0},
                "args": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            },
        ),
    )
    return {
        f"{base}/exec": {"post": execute},
        f"{base}/processes/{{process}}": {"get": _read_output(process)},
        f"{base}/processes/{{process}}/stdin": {"post": _write_input(process)},
        f"{base}/processes/{{process}}/kill": {
            "post": operation("sandbox_kill", "Kill a command.", process, _NOTHING)
        },
        f"{base}/files": _files([*sandbox, path]),
        f"{base}/directory": _directory([*sandbox, path]),
    }


def _read_output(process: list[dict[str, Any]]) -> dict[str, Any]:
    offsets = [
        in_query(name, f"bytes of {name} that were read: those before are dropped", _NUMBER)
        for name in ("stdout", "stderr")
    ]
    wait = in_query(
        "wait_s",
        "wait up to this many seconds for output, or the end",
        {"type": "number", "minimum": 0, "maximum": WAIT_S, "default": 0},
    )
    return operation(
        "sandbox_output",
        "The output of a command from these offsets on.",
        [*process, *offsets, wait],
        {"200": json_response("the command", _OUTPUT)},
    )


def _write_input(process: list[dict[str, Any]]) -> dict[str, Any]:
    return operation(
        "sandbox_stdin",
        "Write to a command's standard input; answered once it has room for it.",
        [*process, in_query("eof", "1: close it afterwards", _FLAG)],
        _NOTHING,
        {"content": _BYTES},
    )


def _files(parameters: list[dict[str, Any]]) -> dict[str, Any]:
    offset = in_query("offset", "position in bytes; of a PUT without one: the end", _NUMBER)
    limit = in_query(
        "limit",
        "bytes to read",
        {"type": "integer", "maximum": FILE_PIECE_BYTES, "default": FILE_PIECE_BYTES},
    )
    flags = [
        in_query("truncate", "1: empty the file first", _FLAG),
        in_query("exclusive", "1: the file must not be there", _FLAG),
    ]
    written = {"type": "object", "properties": {"offset": {"type": "integer"}}}
    return {
        "get": operation(
            "sandbox_read",
            "A piece of a regular file; empty at its end.",
            [*parameters, offset, limit],
            {"200": {"description": "the bytes", "content": _BYTES}},
        ),
        "put": operation(
            "sandbox_write",
            "Write to a regular file, which is made if it is missing.",
            [*parameters, offset, *flags],
            {"200": json_response("the offset behind what was written", written)},
            {"content": _BYTES},
        ),
        "delete": operation(
            "sandbox_remove",
            "Remove a file or directory.",
            [*parameters, in_query("recursive", "1: with all that is in it", _FLAG)],
            _NOTHING,
        ),
    }


def _directory(parameters: list[dict[str, Any]]) -> dict[str, Any]:
    listed = {
        "type": "object",
        "properties": {
            "entries": {"type": "array", "items": {"type": "string"}},
            "size_bytes": {"type": "integer"},
            "is_directory": {"type": "boolean"},
        },
    }
    return {
        "get": operation(
            "sandbox_list",
            "The names in a directory.",
            [*parameters, in_query("stat", "1: size and kind of the path instead", _FLAG)],
            {"200": json_response("the names", listed)},
        ),
        "post": operation(
            "sandbox_mkdir",
            "Make a directory.",
            [*parameters, in_query("parents", "1: those above it too; it may be there", _FLAG)],
            _NOTHING,
        ),
    }

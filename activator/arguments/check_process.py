"""The process that runs expensive argument checks: `python -m
activator.arguments.check_process <seconds>`.

A request (`pilotlight.core.compute.loop`) is the check's document and the body; the answer is the
problem document of InvalidInput, or empty."""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from typing import Any

from activator.arguments.translations import TRANSLATION_S, translated
from activator.arguments.validator import ArgumentValidator
from pilotlight import errors
from pilotlight.core.compute.loop import serve
from pilotlight.spec.function import MethodSpec
from pilotlight.spec.record_json import canonical_json
from pilotlight.validation.guard_patterns import patterns_of

KNOWN_CHECKS = 128
TRANSLATE = b'{"translate"'
"""Prefix of the document of a translation."""
GUARD = b'{"guard"'
"""Prefix of the document of a guard's search in a text; its answer is the rule that matches."""


def main() -> None:
    """Answer requests until standard input ends."""
    seconds = float(sys.argv[1])
    serve(answer_of, lambda document: TRANSLATION_S if document.startswith(TRANSLATE) else seconds)


def answer_of(document: bytes, body: bytes) -> bytes:
    """Return the problem with the arguments as JSON; empty where they are valid. For a translation:
    a line of JSON, and its output."""
    if document.startswith(TRANSLATE):
        return _translation(json.loads(document), body)
    if document.startswith(GUARD):
        return _guarded(json.loads(document), body)
    try:
        _check_of(document).check_fully(body)
    except errors.InvalidInput as e:
        return json.dumps({"message": str(e), "detail": e.detail}).encode()
    except MemoryError:
        return json.dumps(
            {
                "message": "checking the arguments takes too much memory: send fewer arguments",
                "detail": {},
            }
        ).encode()
    return b""


def _translation(asked: dict[str, Any], body: bytes) -> bytes:
    try:
        found = translated(asked["translate"], body, is_answer=asked["is_answer"])
    except (errors.InvalidInput, errors.TooLarge) as e:
        return json.dumps(
            {"error": type(e).__name__, "message": str(e), "detail": e.detail}
        ).encode()
    except MemoryError:
        return json.dumps(
            {
                "error": "TooLarge",
                "message": "translating the body takes too much memory: send a smaller body",
                "detail": {},
            }
        ).encode()
    fields = found._asdict()
    del fields["body"]
    return json.dumps({"error": None, "fields": fields}).encode() + b"\n" + found.body


def _guarded(asked: dict[str, Any], body: bytes) -> bytes:
    patterns = patterns_of(canonical_json(asked["guard"]))
    return patterns.find(body.decode(), is_end=asked["is_end"]).encode()


@lru_cache(maxsize=KNOWN_CHECKS)
def _check_of(document: bytes) -> ArgumentValidator:
    given = json.loads(document)
    method = MethodSpec(schema=given["schema"], parameters=tuple(given["parameters"]))
    return ArgumentValidator(method, given["where"])


if __name__ == "__main__":
    main()

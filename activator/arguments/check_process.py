"""The process that runs expensive argument checks: `python -m
activator.arguments.check_process <seconds>`.

It reads requests from standard input and answers each on standard output. Both are frames: four
bytes of length, then the data. A request is two frames, the check's document and the body; the
answer is one, the problem document of InvalidInput or empty. It runs one check at a time; SIGALRM
ends the process when a check exceeds its time limit, even if the parent has ended: the validator
lets no Python code run meanwhile."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from functools import lru_cache
from typing import Any, BinaryIO

from activator.arguments.translations import TRANSLATION_S, translated
from activator.arguments.validator import ArgumentValidator
from pilotlight import errors
from pilotlight.spec.function import MethodSpec
from pilotlight.spec.record_json import canonical_json
from pilotlight.validation.guard_patterns import patterns_of

MAX_MEMORY_BYTES = 2 * 1024**3
"""Arguments of 10 MiB take some hundred MiB once they are decoded."""
NICENESS = 10
"""Lower CPU priority than the activator."""
KNOWN_CHECKS = 128
TRANSLATE = b'{"translate"'
"""Prefix of the document of a translation."""
GUARD = b'{"guard"'
"""Prefix of the document of a guard's search in a text; its answer is the rule that matches."""
_PR_SET_DUMPABLE = 4


def main() -> None:
    """Answer requests until standard input ends."""
    # other activators have the same uid: they must not read this process's memory
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    seconds = float(sys.argv[1])
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    write_frame(answers, b"ready")
    while (document := read_frame(requests)) is not None:
        body = read_frame(requests)
        if body is None:
            return
        signal.setitimer(
            signal.ITIMER_REAL, TRANSLATION_S if document.startswith(TRANSLATE) else seconds
        )
        answer = answer_of(document, body)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(answers, answer)


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
        memo, data = translated(asked["translate"], body, is_answer=asked["is_answer"])
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
    return json.dumps({"error": None, "memo": memo}).encode() + b"\n" + data


def _guarded(asked: dict[str, Any], body: bytes) -> bytes:
    patterns = patterns_of(canonical_json(asked["guard"]))
    return patterns.find(body.decode(), is_end=asked["is_end"]).encode()


@lru_cache(maxsize=KNOWN_CHECKS)
def _check_of(document: bytes) -> ArgumentValidator:
    given = json.loads(document)
    method = MethodSpec(schema=given["schema"], parameters=tuple(given["parameters"]))
    return ArgumentValidator(method, given["where"])


def read_frame(source: BinaryIO) -> bytes | None:
    """Return the next frame; None where the input has ended."""
    head = source.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "big")
    data = source.read(size)
    return data if len(data) == size else None


def write_frame(sink: BinaryIO, data: bytes) -> None:
    """Write and flush one frame."""
    sink.write(len(data).to_bytes(4, "big") + data)
    sink.flush()


if __name__ == "__main__":
    main()

"""The whole sentence of a call, as its trace tells it: from the gateway over the node agent's
phases into user code, and back out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.harness import PlatformUnderTest, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


def trace_of(platform: PlatformUnderTest, name: str) -> dict[str, Any]:
    """A trace, once it has come to the control plane."""

    def look() -> dict[str, Any] | None:
        done = platform.cli("trace", "show", name, "--json", check=False)
        return dict(json.loads(done.stdout)) if done.returncode == 0 else None

    return wait_for(look, f"the trace of {name}")


def tree(trace: dict[str, Any]) -> dict[str, str]:
    """Name of a span → that of its parent."""
    names = {span["id"]: span["name"] for span in trace["spans"]}
    return {span["name"]: names.get(span["parent"], span["parent"]) for span in trace["spans"]}


def test_a_cold_call_a_traced_one_and_a_stream(platform: PlatformUnderTest) -> None:
    platform.deploy("traced.py")

    cold = platform.post("traced/split", {"text": "a b"})
    assert cold.json() == ["a", "b"]
    found = trace_of(platform, cold.headers["x-request-id"])
    root = "POST /v1/functions/traced/split:invoke"
    below = tree(found)
    assert {
        "exec": root,
        "worker": "exec",
        "tokenise": "worker",
        "look up": "tokenise",
    }.items() <= below.items()
    if cold.headers["pilotlight-start"] != "WARM":
        assert below["start"] == root
        assert "start" in below.values()  # its phases
    (tokenise,) = (span for span in found["spans"] if span["name"] == "tokenise")
    assert tokenise["attributes"] == {"characters": 3}
    (execution,) = (span for span in found["spans"] if span["name"] == "exec")
    assert execution["begin_ms"] <= tokenise["begin_ms"]
    assert tokenise["begin_ms"] + tokenise["ms"] <= execution["begin_ms"] + execution["ms"] + 0.01

    platform.post("traced/split", {"text": "c"}, headers={**platform.headers, **SAMPLED})
    asked = trace_of(platform, TRACE)
    assert asked["spans"][0]["parent"] == SPAN
    assert "tokenise" in tree(asked)

    streamed = platform.post("traced/stream", {"n": 2}, headers={**platform.headers, **SAMPLED})
    assert len(streamed.text.splitlines()) == 2
    of_stream = wait_for(
        lambda: (t := trace_of(platform, TRACE))["calls"][1:] and t, "the stream in the same trace"
    )
    assert {"item 0", "item 1"} <= tree(of_stream).keys()
    listed = json.loads(platform.cli("trace", "list", "traced", "--json").stdout)
    assert {row["call"] for row in listed} >= {
        cold.headers["x-request-id"],
        streamed.headers["x-request-id"],
    }

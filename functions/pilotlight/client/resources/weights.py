"""Weights by name, as typed methods of the client: what was pushed or deployed, and what the node
does with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

from pilotlight.client.json_stream import Json, iter_json_objects
from pilotlight.client.resources.node import NodeResources
from pilotlight.errors import PilotlightError


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInfo:
    """What a name means. What only the node knows is None while it does not answer.

    Attributes:
        manifest: sha256 (hex) of the manifest, which names all files.
        size_bytes, files: of the whole model.
        source: where it came from, for people.
        app: whose deploy brought it; None: it was pushed.
        is_pinned: whether the node keeps it whoever needs room.
        tier: where most of its bytes are: `origin`, `nvme` or `dram`.
        expected_s: what a start would wait for them, predicted.
        instances: running instances of this environment that map it.
    """

    name: str
    manifest: str
    size_bytes: int
    files: int
    source: str
    app: str | None
    is_pinned: bool
    created_at: float
    updated_at: float
    tier: str | None = None
    expected_s: float | None = None
    instances: int | None = None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Parse the controller's answer; members of newer servers are ignored."""
        return cls(**{f.name: body[f.name] for f in dataclasses.fields(cls) if f.name in body})


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsProgress:
    """How far the node is; `info` comes with the last step, bytes where they are known."""

    elapsed_s: float = 0.0
    done_bytes: int = 0
    total_bytes: int = 0
    info: WeightsInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsVerification:
    """What reading the node's copy again found: whether there is one, and paths of files that were
    damaged (they are fetched anew)."""

    is_here: bool
    corrupt: tuple[str, ...]


class WeightsResources(NodeResources):
    """Part of `pilotlight.client.client.Client`."""

    # -- weights -----------------------------------------------------------------------------------
    def list_weights(self) -> list[WeightsInfo]:
        """The environment's weights, by name."""
        return [WeightsInfo.from_json(body) for body in self._list("/v1/weights", "weights")]

    def get_weights(self, name: str) -> WeightsInfo:
        """What `name` means. Raises NotFound."""
        return WeightsInfo.from_json(self._get(_path(name)))

    def put_weights(self, name: str, *, manifest: str, source: str = "") -> WeightsInfo:
        """Let `name` mean a manifest that was uploaded with its files
        (`pilotlight.packaging.weights_push.push_weights`)."""
        body = {"manifest": manifest, "source": source}
        return WeightsInfo.from_json(self._transport.request("PUT", _path(name), json=body).json())

    def delete_weights(self, name: str) -> None:
        """Forget a name. Raises NotFound, or Conflict while it is pinned or in use."""
        self._transport.request("DELETE", _path(name))

    def verify_weights(self, name: str) -> Iterator[WeightsProgress | WeightsVerification]:
        """Have the node read its copy again: steps while it does, what it found last."""
        for part in self._follow(name, "verify"):
            if "corrupt" in part:
                yield WeightsVerification(
                    is_here=bool(part["is_here"]), corrupt=tuple(part["corrupt"])
                )
            else:
                yield _step(part)

    def prefetch_weights(self, name: str) -> Iterator[WeightsProgress]:
        """Bring it to the node's disk; leaving the loop ends that."""
        yield from map(_step, self._follow(name, "prefetch"))

    def pin_weights(self, name: str) -> Iterator[WeightsProgress]:
        """Bring it and keep it there whoever needs room. Needs a key of scope admin."""
        yield from map(_step, self._follow(name, "pin"))

    def unpin_weights(self, name: str) -> WeightsInfo:
        """Let the node evict it again. Needs a key of scope admin."""
        return WeightsInfo.from_json(
            self._transport.request("POST", f"{_path(name)}/unpin", repeatable=True).json()
        )

    def read_blob(
        self, digest: str, *, offset_bytes: int = 0, length_bytes: int | None = None
    ) -> bytes:
        """A blob of this tenant, or a range of it, which is shorter only at its end. The caller
        verifies what it says. Raises NotFound."""
        if length_bytes == 0:
            return b""
        end = "" if length_bytes is None else str(offset_bytes + length_bytes - 1)
        whole = offset_bytes == 0 and length_bytes is None
        headers = {} if whole else {"range": f"bytes={offset_bytes}-{end}"}
        response = self._transport.request("GET", f"/v1/blobs/{digest}", headers=headers)
        if not whole and response.status_code != 206:
            raise PilotlightError(
                f"blob {digest[:12]}: the platform answered {response.status_code} where a range "
                f"was asked for"
            )
        return response.content

    def _follow(self, name: str, verb: str) -> Iterator[Json]:
        ended = False
        with self._transport.stream("POST", f"{_path(name)}/{verb}", repeatable=True) as response:
            for part in iter_json_objects(response):
                ended = "weights" in part or "corrupt" in part
                yield part
        if not ended:
            raise PilotlightError(
                f"{verb} of weights {name!r} broke off: its stream ended without a result; try again"
            )


def _step(part: Json) -> WeightsProgress:
    if "weights" in part:
        return WeightsProgress(info=WeightsInfo.from_json(part["weights"]))
    return WeightsProgress(
        elapsed_s=float(part.get("elapsed_s") or 0),
        done_bytes=int(part.get("done_bytes") or 0),
        total_bytes=int(part.get("total_bytes") or 0),
    )


def _path(name: str) -> str:
    return f"/v1/weights/{quote(name, safe='')}"

"""Client methods for weights: names, manifests, and their state on the node."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pilotlight.client.json_stream import Json, iter_json_objects
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment
from pilotlight.errors import PilotlightError


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInfo:
    """The weights behind a name. Values known only to the node are None while it is unreachable.

    Attributes:
        manifest: sha256 (hex) of the manifest, which lists all files.
        size_bytes, files: total size and number of files.
        source: origin of the files, for display.
        app: app whose deploy uploaded them; None: they were pushed.
        is_pinned: whether the node never evicts them.
        tier: where most of their bytes are: `origin`, `nvme` or `dram`.
        expected_s: predicted time that a start waits for them.
        instances: running instances of this environment that map them.
        hbm: GPUs that hold them for instances of this environment: `{"gpu", "uuid",
            "memory_bytes", "bytes", "state", "instance"}`; None: the node has no GPU."""

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
    hbm: list[dict[str, Any]] | None = None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Parse the response of the controller. Unknown members, of newer servers, are ignored."""
        return cls(**{f.name: body[f.name] for f in dataclasses.fields(cls) if f.name in body})


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsProgress:
    """Progress of the node. `info` is set in the last step; bytes are set where known."""

    elapsed_s: float = 0.0
    done_bytes: int = 0
    total_bytes: int = 0
    info: WeightsInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsVerification:
    """Result of a verification of the copy on the node: whether there is one, and the paths of
    corrupt files, which are fetched again."""

    is_here: bool
    corrupt: tuple[str, ...]


class WeightsResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for weights."""

    # -- weights -----------------------------------------------------------------------------------
    def list_weights(self) -> list[WeightsInfo]:
        """List the weights of the environment by name."""
        return [WeightsInfo.from_json(body) for body in self._list("/v1/weights", "weights")]

    def get_weights(self, name: str) -> WeightsInfo:
        """Return the weights `name`. Raises NotFound."""
        return WeightsInfo.from_json(self._get(_path(name)))

    def put_weights(self, name: str, *, manifest: str, source: str = "") -> WeightsInfo:
        """Assign `name` to a manifest that was uploaded with its files
        (`pilotlight.packaging.weights_push.push_weights`)."""
        body = {"manifest": manifest, "source": source}
        return WeightsInfo.from_json(self._transport.request("PUT", _path(name), json=body).json())

    def delete_weights(self, name: str) -> None:
        """Delete a name. Raises NotFound, or Conflict while it is pinned or in use."""
        self._transport.request("DELETE", _path(name))

    def verify_weights(self, name: str) -> Iterator[WeightsProgress | WeightsVerification]:
        """Make the node verify its copy: yields its progress, and the result last."""
        for part in self._follow(name, "verify"):
            if "corrupt" in part:
                yield WeightsVerification(
                    is_here=bool(part["is_here"]), corrupt=tuple(part["corrupt"])
                )
            else:
                yield _step(part)

    def prefetch_weights(self, name: str) -> Iterator[WeightsProgress]:
        """Fetch weights to the disk of the node; yields its progress. Leaving the loop stops it."""
        yield from map(_step, self._follow(name, "prefetch"))

    def pin_weights(self, name: str) -> Iterator[WeightsProgress]:
        """Fetch weights to the node and protect them from eviction; yields its progress. Requires a
        key with scope admin."""
        yield from map(_step, self._follow(name, "pin"))

    def unpin_weights(self, name: str) -> WeightsInfo:
        """Allow the node to evict weights again. Requires a key with scope admin."""
        return WeightsInfo.from_json(
            self._transport.request("POST", f"{_path(name)}/unpin", repeatable=True).json()
        )

    def read_blob(
        self, digest: str, *, offset_bytes: int = 0, length_bytes: int | None = None
    ) -> bytes:
        """Return a blob of this tenant, or a range of it, which is shorter only at the end of the
        blob. The caller verifies the content. Raises NotFound."""
        if length_bytes == 0:
            return b""
        end = "" if length_bytes is None else str(offset_bytes + length_bytes - 1)
        whole = offset_bytes == 0 and length_bytes is None
        headers = {} if whole else {"range": f"bytes={offset_bytes}-{end}"}
        response = self._transport.request("GET", f"/v1/blobs/{digest}", headers=headers)
        if not whole and response.status_code != 206:
            raise PilotlightError(
                f"blob {digest[:12]}: the platform returned status {response.status_code} to a "
                f"range request, expected 206"
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
                f"{verb} of weights {name!r} was interrupted: its stream ended without a result; "
                "try again"
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
    return f"/v1/weights/{path_segment(name)}"

"""The fake platform's weights by name: what `/v1/weights` answers, over the blobs that were
uploaded to it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.protocol import CONTENT_NDJSON
from tests.fakes.user_code import Answer, Asked
from weight_cache.manifest import parse

_RANGE = re.compile(r"bytes=(\d+)-(\d*)\Z")
NOW = 1_700_000_000.0


@dataclass
class PushedWeights:
    """Rows by (environment, name); `blobs` are the platform's. `corrupt`: paths that the next
    verify finds; `read`: ranges asked for."""

    blobs: dict[str, bytes]
    rows: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    corrupt: list[str] = field(default_factory=list)
    used_by: list[str] = field(default_factory=list)
    read: list[tuple[str, int]] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)

    # -- blobs -------------------------------------------------------------------------------------
    def get_blob(self, asked: Asked, digest: str) -> Answer:
        """A blob or a range of it; one of `damaged` comes with a wrong byte."""
        if digest not in self.blobs:
            raise NotFound(f"there is no blob {digest}")
        data = self.blobs[digest]
        match = _RANGE.match(asked.headers.get("range", ""))
        begin, end = (
            (int(match[1]), int(match[2]) + 1 if match[2] else len(data))
            if match
            else (0, len(data))
        )
        self.read.append((digest, begin))
        part = data[begin:end]
        if digest in self.damaged:
            part = part[:-1] + bytes([part[-1] ^ 1])
        return Answer(
            status=206 if match else 200, content_type="application/octet-stream", body=part
        )

    # -- names -------------------------------------------------------------------------------------
    def listing(self, asked: Asked) -> Answer:
        return _json(
            {
                "weights": [
                    row
                    for (environment, _), row in sorted(self.rows.items())
                    if environment == asked.environment
                ]
            }
        )

    def show(self, asked: Asked, name: str) -> Answer:
        return _json(self._row(asked, name))

    def put(self, asked: Asked, name: str) -> Answer:
        body = asked.json()
        if body["manifest"] not in self.blobs:
            raise InvalidInput(f"weights {body['manifest']} were not uploaded")
        manifest = parse(self.blobs[body["manifest"]])
        if missing := next(
            (digest for digest in manifest.blobs() if digest not in self.blobs), None
        ):
            raise InvalidInput(f"their file {missing} was not uploaded")
        self.rows[asked.environment, name] = {
            "name": name,
            "manifest": body["manifest"],
            "size_bytes": manifest.size_bytes,
            "files": len(manifest.files),
            "source": body["source"],
            "app": None,
            "is_pinned": False,
            "created_at": NOW,
            "updated_at": NOW,
            "tier": "origin",
            "expected_s": None,
            "instances": len(self.used_by),
        }
        return _json(self._row(asked, name))

    def delete(self, asked: Asked, name: str) -> Answer:
        row = self._row(asked, name)
        if row["is_pinned"] or self.used_by:
            raise Conflict(f"weights {name!r} are used by {', '.join(self.used_by) or 'a pin'}")
        del self.rows[asked.environment, name]
        return Answer(status=204)

    # -- the node ----------------------------------------------------------------------------------
    def verify(self, asked: Asked, name: str) -> Answer:
        is_here = self._row(asked, name)["tier"] != "origin"
        return _ndjson(
            [{"elapsed_s": 0.5}, {"is_here": is_here, "corrupt": self.corrupt if is_here else []}]
        )

    def prefetch(self, asked: Asked, name: str) -> Answer:
        row = self._row(asked, name)
        row |= {"tier": "nvme", "expected_s": 0.25}
        total = row["size_bytes"]
        return _ndjson(
            [{"done_bytes": total // 2, "total_bytes": total, "elapsed_s": 0.1}, {"weights": row}]
        )

    def pin(self, asked: Asked, name: str) -> Answer:
        self._row(asked, name)["is_pinned"] = True
        return self.prefetch(asked, name)

    def unpin(self, asked: Asked, name: str) -> Answer:
        self._row(asked, name)["is_pinned"] = False
        return self.show(asked, name)

    def _row(self, asked: Asked, name: str) -> dict[str, Any]:
        if (asked.environment, name) not in self.rows:
            raise NotFound(f"there are no weights {name!r} in environment {asked.environment!r}")
        return self.rows[asked.environment, name]


def _json(value: Any) -> Answer:
    return Answer(body=json.dumps(value).encode())


def _ndjson(lines: list[dict[str, Any]]) -> Answer:
    def sent() -> Iterator[bytes]:
        for line in lines:
            yield json.dumps(line).encode() + b"\n"

    return Answer(content_type=CONTENT_NDJSON, stream=sent())

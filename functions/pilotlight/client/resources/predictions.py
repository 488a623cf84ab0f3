"""Client methods for prediction logs."""

from __future__ import annotations

import re
import tarfile
import tempfile
from pathlib import Path
from typing import IO, Final

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment
from pilotlight.errors import Unavailable

_MEMBER: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}/[0-9a-f]{8,64}\.parquet")
"""`<hour>/<id>.parquet`: nothing else of an archive is written."""


class PredictionResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for prediction logs."""

    def download_predictions(
        self,
        app: str,
        function: str,
        directory: Path,
        *,
        since: float | None = None,
        until: float | None = None,
    ) -> list[Path]:
        """Write the Parquet files of a prediction log below `directory`, by hour, and return their
        paths. `since`, `until`: seconds since the epoch; whole hours are returned.

        Raises TooLarge for more than one read may have, Unavailable for an incomplete answer."""
        params = without_none({"since": since, "until": until})
        with tempfile.TemporaryFile() as archive:
            with self._transport.stream("GET", _path(app, function), params=params) as response:
                for piece in response.iter_bytes():
                    archive.write(piece)
            archive.seek(0)
            return _extract(archive, directory)

    def delete_predictions(self, app: str, function: str, *, until: float | None = None) -> Json:
        """Delete the prediction log of a function, or its hours that begin before `until` (seconds
        since the epoch). Returns the deleted `files` and `rows`."""
        params = without_none({"until": until})
        return dict(self._transport.request("DELETE", _path(app, function), params=params).json())


def _extract(archive: IO[bytes], directory: Path) -> list[Path]:
    written: list[Path] = []
    try:
        with tarfile.open(fileobj=archive, mode="r:") as members:
            for member in members:
                content = members.extractfile(member)
                if content is None or not _MEMBER.fullmatch(member.name):
                    raise tarfile.ReadError(f"unexpected member {member.name[:80]!r}")
                path = directory / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
                written.append(path)
    except tarfile.ReadError as e:
        raise Unavailable(f"the prediction log arrived incomplete: {e}", retry_after_s=1) from e
    return written


def _path(app: str, function: str) -> str:
    return f"/v1/apps/{path_segment(app)}/functions/{path_segment(function)}/predictions"

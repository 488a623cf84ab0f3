"""The launch file, by which the shim passes its parameters to a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A parsed launch file.

    Attributes:
        spec: the function to run.
        revision: the revision's platform-wide key.
        code: directory of the unpacked bundle.
        site: directories of the image's packages.
        records_imports: whether the node makes environment snapshots from what is imported.
        weights: name → directory of mounted weights.
        volumes: mount paths of volumes.
        work: the working directory, which is writable and part of a snapshot.
        secret_variables: environment variables that are set only when an instance wakes.
        control_fd: the worker's end of the SOCK_SEQPACKET pair with the shim.
        chosen_threads: names of the one-thread variables that the worker set, not the user; raised
            when it becomes an instance.
    """

    spec: FunctionSpec
    revision: str
    code: str
    site: tuple[str, ...]
    records_imports: bool
    weights: Mapping[str, str]
    volumes: tuple[str, ...]
    work: str
    secret_variables: tuple[str, ...]
    control_fd: int
    chosen_threads: tuple[str, ...]

    @classmethod
    def from_json(cls, body: Mapping[str, Any], *, chosen_threads: tuple[str, ...] = ()) -> Self:
        """Parse the document. Raises KeyError or InvalidInput if it is invalid."""
        return cls(
            spec=from_json(FunctionSpec, body["entry"], "entry"),
            revision=str(body["revision"]),
            code=str(body["code"]),
            site=tuple(str(directory) for directory in body.get("site", ())),
            records_imports=bool(body.get("records_imports", False)),
            weights={str(k): str(v) for k, v in body.get("weights", {}).items()},
            volumes=tuple(str(path) for path in body.get("volumes", ())),
            work=str(body["work"]),
            secret_variables=tuple(str(name) for name in body.get("secret_variables", ())),
            control_fd=int(body["control_fd"]),
            chosen_threads=chosen_threads,
        )

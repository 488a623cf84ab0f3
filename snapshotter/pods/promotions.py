"""Which pods of this node were promoted, and to what: a pod is promoted once, to one launch
document, and never serves another one.

    <directory>/<pod uid>      JSON: tenant, and the sha256 of the document's signature

A marker is on the disk before the pod sees anything of its tenant, and outlives the agent, a crash
of the machine, and a restart of the pod's container. It is removed long after the pod's last
process has ended."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from pilotlight.core.transport.pod_calls import is_pod_uid
from snapshotter.pods.registration import Announcement, NotAdmitted

POD_LABEL = "pod"
"""Label of a promoted pod's launch document: the uid of the only pod that may announce it."""
GONE_S = 3600.0
"""How long a pod must have been without any process before its marker is removed: after a crash of
the machine the kubelet starts its containers again within minutes, under the same uid."""


class Promotions:
    """The markers of this node. Blocking; called in threads, but for `require` and `is_promoted`,
    which read one small file."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError when the directory cannot be created."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for draft in directory.glob(".*"):  # of an agent that was killed
            draft.unlink()
        self._directory = directory
        self._clock = clock
        self._absent_since: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Promotions {self._directory}>"

    def is_promoted(self, pod: str) -> bool:
        """Whether the pod was promoted."""
        return self._marker(pod).exists()

    def require(self, announced: Announcement, pod: str | None) -> None:
        """Raises NotAdmitted unless the pod `pod` (as the kernel tells; None: unknown) may announce
        this document: a promoted pod its own, and other pods documents of no pod in particular."""
        named = announced.launch.labels.get(POD_LABEL)
        if named is not None and named != pod:
            raise NotAdmitted(
                f"the launch document is of pod {named}, not of this one ({pod or 'unknown'})"
            )
        if pod is None:
            return
        try:
            known = self._marker(pod).read_bytes()
        except FileNotFoundError:
            if named is None:
                return
            raise NotAdmitted(f"pod {pod} was not promoted") from None
        if known != _content(announced):
            raise NotAdmitted(f"pod {pod} was promoted to another launch document")

    def record(self, announced: Announcement, pod: str) -> None:
        """Promote the pod to this document, durably; a repetition changes nothing. Raises
        NotAdmitted if it was promoted to another one, or the document is not of this pod;
        OSError."""
        if announced.launch.labels.get(POD_LABEL) != pod or not announced.signature:
            raise NotAdmitted(f"the launch document is not one for pod {pod}")
        self._write(self._marker(pod), _content(announced))
        self.require(announced, pod)

    def sweep(self, present: Collection[str]) -> int:
        """Remove the markers of pods that have been gone for GONE_S; returns how many. `present`:
        uids of the pods that have processes."""
        now, marked = self._clock(), filter(is_pod_uid, os.listdir(self._directory))
        self._absent_since = {
            uid: self._absent_since.get(uid, now) for uid in marked if uid not in present
        }
        gone = [uid for uid, since in self._absent_since.items() if now - since >= GONE_S]
        for uid in gone:
            (self._directory / uid).unlink(missing_ok=True)
        return len(gone)

    def _marker(self, pod: str) -> Path:
        if not is_pod_uid(pod):
            raise NotAdmitted("the uid of a pod is invalid")
        return self._directory / pod

    def _write(self, marker: Path, content: bytes) -> None:
        """Create the marker unless it exists; complete and on the disk under its name."""
        draft = marker.with_name(f".{marker.name}-{os.getpid()}-{time.monotonic_ns()}")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(draft, marker)
        finally:
            draft.unlink()
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _content(announced: Announcement) -> bytes:
    """Content of the marker. A signature names a document, and stays the same when a newer version
    of the platform adds fields to it."""
    document = hashlib.sha256(announced.signature.encode()).hexdigest()
    return json.dumps(
        {"tenant": announced.launch.labels.get("tenant"), "document": document}
    ).encode()

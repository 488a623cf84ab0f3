"""What a node's container runtime knows of images: which cannot be pulled, what was pulled from a
registry on this machine, and what an image brings along."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pilotlight.kubernetes.cluster import Cluster
from tests.fakes.knative import image_pull
from tests.fakes.knative.image_pull import PulledImage, PullFailed

ROOT = Path(__file__).resolve().parents[3]
Json = dict[str, Any]


@dataclass(kw_only=True)
class Images:
    """Owner: the event loop.

    Attributes:
        directory: for images that are pulled.
        missing: reference → what the registry says; an image in it cannot be pulled. entrypoints:
        reference → argv. pulled: by reference, from registries on this machine; all others are
        runtime images, whose entrypoint is the launcher and whose files are this machine's.
    """

    directory: Path
    missing: dict[str, str] = field(default_factory=dict)
    entrypoints: dict[str, list[str]] = field(default_factory=dict)
    pulled: dict[str, PulledImage] = field(default_factory=dict)
    _accepted: set[tuple[str, str]] = field(default_factory=set)

    async def pull(self, cluster: Cluster, pod: Json, reference: str) -> str | None:
        """Have an image on the node; what the kubelet says if that fails.

        A pod whose logins have not pulled it before has to show them to the registry, also where
        the image is there (KubeletEnsureSecretPulledImages, on since Kubernetes 1.35)."""
        if (message := self.missing.get(reference)) is not None:
            return message
        repository = image_pull.repository_of(reference)
        if repository is None:
            return None
        logins = await image_pull.logins(cluster, pod, repository)
        if any((reference, login) in self._accepted for login in logins):
            return None
        folder = self.directory / reference.rpartition(":")[2]
        try:
            self.pulled[reference], login = await image_pull.pull(reference, logins, folder)
        except PullFailed as e:
            return str(e)
        self._accepted.add((reference, login))
        return None

    def root(self, reference: str) -> Path | None:
        """The image's files; None: this machine's."""
        found = self.pulled.get(reference)
        return found.root if found is not None else None

    def argv(self, reference: str) -> list[str]:
        """The entrypoint."""
        if (found := self.pulled.get(reference)) is not None:
            return found.argv
        return self.entrypoints.get(reference) or [sys.executable, "-m", "pilotlight.launcher"]

    def env(self, reference: str) -> Mapping[str, str]:
        """The image's own variables: where the platform's packages lie in it."""
        if (found := self.pulled.get(reference)) is not None:
            return found.env
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT / 'functions'}:{ROOT}",
            "LANG": "C.UTF-8",
        }

    def visible(self) -> list[str]:
        """Directories of this machine that are the image's content, where they do not lie below
        what every container sees."""
        return sorted({str(ROOT), sys.prefix, sys.base_prefix})

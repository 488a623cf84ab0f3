"""What a node's container runtime knows of images: which cannot be pulled, and what an image brings
along."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


@dataclass(kw_only=True)
class Images:
    """Owner: the event loop.

    Attributes:
        missing: reference → what the registry says; an image in it cannot be pulled. entrypoints:
        reference → argv; all others are runtime images, whose entrypoint is the launcher.
    """

    missing: dict[str, str] = field(default_factory=dict)
    entrypoints: dict[str, list[str]] = field(default_factory=dict)

    def argv(self, reference: str) -> list[str]:
        """The entrypoint."""
        return self.entrypoints.get(reference) or [sys.executable, "-m", "pilotlight.launcher"]

    def env(self) -> Mapping[str, str]:
        """The image's own variables: where the platform's packages lie in it."""
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT / 'functions'}:{ROOT}",
            "LANG": "C.UTF-8",
        }

    def visible(self) -> list[str]:
        """Directories of this machine that are the image's content, where they do not lie below
        what every container sees."""
        return sorted({str(ROOT), sys.prefix, sys.base_prefix})

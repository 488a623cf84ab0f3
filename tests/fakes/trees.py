"""Removing directories that tests made, as any user."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def remove_tree(root: Path) -> None:
    """Remove a directory with all below it, also directories that only root could change as they
    are. Raises FileNotFoundError."""
    for directory, _, _ in os.walk(root):
        Path(directory).chmod(0o700)  # before the walk descends into it
    shutil.rmtree(root)

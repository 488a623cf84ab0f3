"""Build an image with a Debian package as the node agent does, from this machine's own apt: root,
debootstrap, and a network on which apt works. Exit status 0 when the package ran in a root file
system of the image's own. What needs no network is tested in
tests/snapshotter/images/test_base_rootfs.py."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from snapshotter.images.images import Images, runtime_requirements

_UID = 20_999
_COMMANDS = ["hello", "id -un", "test ! -e /root/.ssh && test ! -e /boot/vmlinuz"]


async def main() -> int:
    """Build it in a home of its own, and show what the build says."""
    said: list[str] = []

    async def show(part: Mapping[str, Any]) -> None:
        if "text" in part:
            said.append(part["text"])
            print(part["text"], flush=True)

    steps = [{"op": "apt", "packages": ["hello"]}, {"op": "run", "commands": _COMMANDS}]
    description = {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "steps": steps}
    with tempfile.TemporaryDirectory(prefix="pl", dir="/var/tmp") as home:
        images = Images(Path(home), environ=os.environ, requirements=runtime_requirements())
        layout = images.layout(await images.build(description, uid=_UID, part=show), uid=_UID)
        made = layout.rootfs is not None and (layout.rootfs / "usr/bin/hello").exists()
    return 0 if made and "Hello, world!" in said and "root" in said else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

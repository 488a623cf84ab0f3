"""An OCI layout as a container runtime would run it: layers one upon the other, a read-only root,
an unprivileged user, no capabilities."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UID = 20777
WAIT_S = 40.0
_ENTER = """
set -e
PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount --bind "$R" "$R"
mount --rbind /dev "$R/dev"
mount --bind "$W/scratch" "$R/scratch"
mount --bind "$W/launch" "$R/etc/pilotlight"
mount -t proc proc "$R/proc" 2>/dev/null || mount --rbind /proc "$R/proc"
mount -o remount,bind,ro "$R"
mount -o remount,bind,ro "$R/etc/pilotlight"
exec chroot --userspec="$U:$U" --groups= "$R" "$@"
"""


def document(layout: Path, digest: str) -> Any:
    """A JSON document of the layout."""
    return json.loads((layout / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes())


def manifest_and_config(layout: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the only image."""
    index = json.loads((layout / "index.json").read_bytes())
    manifest = document(layout, index["manifests"][0]["digest"])
    return manifest, document(layout, manifest["config"]["digest"])


def unpack(layout: Path, root: Path) -> dict[str, Any]:
    """All layers of a layout into `root`; its configuration."""
    manifest, config = manifest_and_config(layout)
    for layer in manifest["layers"]:
        with tarfile.open(
            layout / "blobs" / "sha256" / layer["digest"].removeprefix("sha256:")
        ) as tar:
            for name in tar.getnames():
                if name.endswith("/.wh..wh..opq"):
                    shutil.rmtree((root / name).parent, ignore_errors=True)
            tar.extraction_filter = getattr(tarfile, "tar_filter", None)  # since Python 3.11.4
            tar.extractall(root)
    return config


class Container:
    """One process in an unpacked image. Needs root. `launch`: the launch document."""

    def __init__(self, layout: Path, launch: Mapping[str, Any]) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="plc"))
        self._home.chmod(0o755)
        self.root, work = self._home / "root", self._home / "work"
        self.root.mkdir()
        for name in ("scratch", "launch"):
            (work / name).mkdir(parents=True)
        os.chown(work / "scratch", UID, UID)
        (work / "launch" / "launch.json").write_text(json.dumps(launch))
        config = unpack(layout, self.root)["config"]
        self.root.chmod(0o755)
        environ = dict(line.partition("=")[::2] for line in config["Env"])
        environ |= {
            "PILOTLIGHT_LAUNCH": "/etc/pilotlight/launch.json",
            "PILOTLIGHT_NODE": "/pilotlight",
            "PILOTLIGHT_WORK": "/scratch",
            "PILOTLIGHT_LISTEN": "127.0.0.1:0",
            "PILOTLIGHT_POD": "pod-1",
        }
        self._said = b""
        self.process = subprocess.Popen(
            ["unshare", "--mount", "/bin/sh", "-c", _ENTER, "sh", *config["Entrypoint"]],
            env={**environ, "R": str(self.root), "W": str(work), "U": str(UID)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def wait_said(self, pattern: str) -> re.Match[str]:
        """The first match in what it writes to stderr; bounded."""
        stream = self.process.stderr
        assert stream is not None
        while (found := re.search(pattern, self.said)) is None:
            assert select.select([stream], [], [], WAIT_S)[0], (
                f"waited for {pattern!r}; it said:\n{self.said}"
            )
            data = os.read(stream.fileno(), 65536)
            assert data, f"waited for {pattern!r}; it ended, having said:\n{self.said}"
            self._said += data
        return found

    @property
    def said(self) -> str:
        """All of stderr that was read so far."""
        return self._said.decode(errors="replace")

    def close(self) -> int:
        """SIGTERM; its exit status."""
        self.process.terminate()
        try:
            status = self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            assert self.process.stderr is not None
            self.process.stderr.close()
            shutil.rmtree(self._home)
        return status

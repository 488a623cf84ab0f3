"""A container image with this interpreter, this machine's shell and file tools, and a package that
it alone has, in a registry of the tests that asks for no login."""

from __future__ import annotations

import gzip
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fakes.small_rootfs import make_base

MODULE = "only_in_base"
_LEFT_OUT = shutil.ignore_patterns(
    *("test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip"),
    *("site-packages", "dist-packages", "__pycache__", "config-*", "pydoc_data"),
)


def make_base_tree(work: Path) -> Path:
    """The files of the image, in scratch directory `work`."""
    root = make_base(work / "bases", work / "package")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    local = root / "usr/local"
    (local / "bin").mkdir(parents=True)
    shutil.copy2(Path(sys.executable).resolve(), local / f"bin/python{version}")
    (local / "bin/python3").symlink_to(f"python{version}")
    library = local / f"lib/python{version}"
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=_LEFT_OUT)
    for site in ("site-packages", "dist-packages"):  # the second where Debian built it
        (library / site).mkdir()
        (library / f"{site}/{MODULE}.py").write_text("VALUE = 7\n")
    return root


def push_tree(root: Path, work: Path, host: str, name: str, *, variables: Mapping[str, str]) -> str:
    """Push a tree as an image of one layer; `host/name:tag`. Needs skopeo."""
    layout = work / "layout"
    blobs = layout / "blobs/sha256"
    blobs.mkdir(parents=True)
    with tarfile.open(work / "layer", "w:gz", compresslevel=1) as layer:
        layer.add(root, arcname=".")
    plain = hashlib.sha256(gzip.decompress((work / "layer").read_bytes())).hexdigest()
    digest = hashlib.sha256((work / "layer").read_bytes()).hexdigest()
    size = (work / "layer").stat().st_size
    (work / "layer").rename(blobs / digest)

    def keep(document: Mapping[str, Any], kind: str) -> dict[str, Any]:
        raw = json.dumps(document).encode()
        name = hashlib.sha256(raw).hexdigest()
        (blobs / name).write_bytes(raw)
        return {"mediaType": kind, "digest": f"sha256:{name}", "size": len(raw)}

    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
        "os": "linux",
        "config": {"Env": [f"{key}={value}" for key, value in variables.items()]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{plain}"]},
    }
    gzipped = "application/vnd.oci.image.layer.v1.tar+gzip"
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": keep(config, "application/vnd.oci.image.config.v1+json"),
        "layers": [{"mediaType": gzipped, "digest": f"sha256:{digest}", "size": size}],
    }
    described = keep(manifest, str(manifest["mediaType"]))
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    to = f"{host}/{name}:latest"
    command = ["skopeo", "--insecure-policy", "copy", "--dest-tls-verify=false"]
    source = f"oci:{layout}"
    subprocess.run([*command, source, f"docker://{to}"], check=True, stdout=subprocess.DEVNULL)
    return to

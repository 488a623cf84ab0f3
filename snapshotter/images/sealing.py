"""What makes a built directory an image: read-only files, nothing that leads out of it, and its
metadata (`image.json`)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pilotlight.core.image_steps import ABSOLUTE, check_copy_target
from pilotlight.core.openat2 import check_directory_beneath, open_file_beneath
from snapshotter.images.base_rootfs import CACHES, packages_digest
from snapshotter.images.build_sandbox import BuildSandbox
from snapshotter.images.oci.image_documents import package_directories
from snapshotter.linux.atomic_directory import TooManyEntries, freeze, remove_tree
from snapshotter.shim.sandbox import mounts, root_directory


def seal_image(
    box: BuildSandbox, env: Mapping[str, str], max_entries: int, base_digest: str = ""
) -> None:
    """Make the built directories read-only and write the image's metadata."""
    temp, interpreter, left = box.image, box.interpreter, max_entries
    for name in CACHES if box.ids is not None else ():
        with contextlib.suppress(OSError):  # a step removed it, or replaced it by a link
            remove_tree(check_directory_beneath(box.rootfs, name))
    for name in ("env", "files", *(("rootfs",) if box.ids is not None else ())):
        try:
            left -= freeze(temp / name, owners=box.owners, max_entries=left)
        except TooManyEntries as e:
            raise ValueError(
                f"it has more than {max_entries} files, directories and links, the limit of one "
                f"image: remove what the function does not need (caches, tests, sources) in the "
                f"step that creates it, or read it from weights"
            ) from e
    site = [f"env/lib/python{interpreter.version}/site-packages", "files"]
    body: dict[str, Any] = {
        "python": str(interpreter.executable),
        "prefix": str(interpreter.prefix),
        "env": dict(env),
    }
    if box.has_own_python:
        python = interpreter.executable.relative_to(temp)
        prefix = interpreter.prefix.relative_to(box.rootfs)
        os.close(open_file_beneath(temp, str(python)))
        check_directory_beneath(box.rootfs, str(prefix))
        body |= {"python": str(python), "prefix": str(interpreter.prefix.relative_to(temp))}
        found = package_directories(box.rootfs, str(prefix), interpreter.version)
        site += [f"rootfs/{name}" for name in found]
    for name in site:
        # slots bind these: a tenant's link would redirect the bind
        check_directory_beneath(temp, name)
    body["site"] = site
    if os.path.lexists(temp / "files" / ABSOLUTE):
        # links of a slot's root lead here: the names are a tenant's
        absolute = check_directory_beneath(temp, f"files/{ABSOLUTE}")
        body["links"] = sorted(os.listdir(absolute))
        for name in body["links"]:
            check_copy_target(f"/{name}")
    if box.ids is not None:
        root_directory.complete(str(box.rootfs), uid=box.uid or 0, home=mounts.HOME)
        body["rootfs"] = _rootfs_digest(box.rootfs, base_digest)
    (temp / "image.json").write_text(json.dumps(body, sort_keys=True))
    (temp / "image.json").chmod(0o644)  # regardless of our umask
    temp.chmod(0o755)


def _rootfs_digest(rootfs: Path, base_digest: str) -> str:
    if not base_digest:
        return packages_digest(rootfs)
    packages = ""
    with contextlib.suppress(FileNotFoundError):  # no image of Debian
        packages = packages_digest(rootfs)
    return hashlib.sha256(f"{base_digest} {packages}".encode()).hexdigest()

"""A container image as a deploy pushes it, with a module that nothing else has, in the registry of
the tests."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from pilotlight.core.oci.image_reference import parse_repository
from pilotlight.packaging.oci.contents import LayerContents
from pilotlight.packaging.oci.environment import own_environment
from pilotlight.packaging.oci.export import ExportResult, export_image
from pilotlight.packaging.oci.layers import write_layer
from pilotlight.packaging.oci.layout import write_image
from pilotlight.packaging.oci.registry import Registry
from pilotlight.packaging.oci.registry_login import find_login
from snapshotter.images.oci.container_images import ContainerImages
from tests.fakes.image_registry import ImageRegistry

TENANT = "t-1"
MODULE = "only_here"


def push_image(registry: ImageRegistry, *, value: int = 7, node_directory: Path) -> str:
    """Make and push an image of the running interpreter; its reference. In it `only_here.VALUE` is
    `value`. `node_directory`: where the pods of the test see that of their node. Takes seconds of
    processor time."""
    repository = parse_repository(f"{registry.host}/functions/{TENANT}")
    with tempfile.TemporaryDirectory(prefix="pl") as name:
        (files := Path(name) / "files").mkdir()
        (files / f"{MODULE}.py").write_text(f"VALUE = {value}\n")
        environment = replace(own_environment(), files=files, variables={"IN_IMAGE": "yes"})
        made = export_image(
            None, environment, layout := Path(name) / "layout", tag="latest", epoch_s=0
        )
        digest = _with_directory(layout, made, node_directory)
        with Registry(repository, find_login(repository, registry.environ())) as pushing:
            pushing.push(layout, tag=digest[7:19])
    return f"{repository}@{digest}"


def _with_directory(layout: Path, made: ExportResult, directory: Path) -> str:
    """The image with a layer more, in which the directory is."""
    blobs = layout / "blobs/sha256"
    manifest: dict[str, Any] = json.loads((blobs / made.digest[7:]).read_bytes())
    config = json.loads((blobs / manifest["config"]["digest"][7:]).read_bytes())
    contents = LayerContents()
    contents.directory(str(directory)[1:])
    layers = [*made.layers, write_layer(contents, blobs, title="mount point", epoch_s=0)]
    config["rootfs"]["diff_ids"] = [layer.diff_id for layer in layers]
    return write_image(layout, layers, config=config, tag="latest")


def images_of_node(home: Path, registry: ImageRegistry) -> ContainerImages:
    """Those of a node that may pull from the registry."""
    login = registry.login / "config.json"
    return ContainerImages(home, login_file=login, max_bytes=1 << 40)

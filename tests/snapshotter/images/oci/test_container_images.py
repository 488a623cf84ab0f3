"""Container images of functions on a node: pulled from a real registry, unpacked, and removed when
others need their room."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.oci.image_reference import parse_repository
from pilotlight.packaging.oci.contents import LayerContents
from pilotlight.packaging.oci.layers import write_layer
from pilotlight.packaging.oci.layout import create_layout, write_image
from pilotlight.packaging.oci.registry import Registry
from pilotlight.packaging.oci.registry_login import find_login
from snapshotter.errors import BundleUnavailable, SnapshotterError
from snapshotter.images.oci.container_images import KEPT_S, ContainerImages, images_of
from snapshotter.types import CONTAINER_IMAGE_LABEL, LaunchSpec, RevisionKey
from tests.fakes.clock import ManualClock
from tests.fakes.image_registry import ImageRegistry

TENANT, OTHER = "t-1", "t-2"
PYTHON = "/opt/pilotlight/python/bin/python3.11"
LAUNCHER = [PYTHON, "-m", "pilotlight.launcher"]
Fill = Callable[[LayerContents], None]


def whole(contents: LayerContents) -> None:
    """What a worker needs."""
    contents.text(PYTHON, "#!")
    contents.directory("opt/pilotlight/python/lib")
    contents.text("opt/pilotlight/site/package.py", "x = 1\n")


def push(
    registry: ImageRegistry, folder: Path, *fills: Fill, tenant: str = TENANT, **config: Any
) -> str:
    """An image of so many layers in the registry; its reference."""
    blobs = create_layout(folder)
    layers = []
    for number, fill in enumerate(fills or (whole,)):
        fill(contents := LayerContents())
        layers.append(write_layer(contents, blobs, title=f"layer {number}", epoch_s=0))
    settings = {"Entrypoint": LAUNCHER, "Env": ["A=b", "PATH=/bin"], **config}
    document = {
        "architecture": "amd64",
        "os": "linux",
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [one.diff_id for one in layers]},
    }
    digest = write_image(folder, layers, config=document, tag="latest")
    repository = parse_repository(f"{registry.host}/functions/{tenant}")
    with Registry(repository, find_login(repository, registry.environ())) as pushing:
        pushing.push(folder, tag=digest[7:19])
    return f"{repository}@{digest}"


def node(home: Path, registry: ImageRegistry | None, **changes: Any) -> ContainerImages:
    """The images of a node."""
    login = registry.login / "config.json" if registry is not None else None
    return ContainerImages(home, **{"login_file": login, "max_bytes": 10**8, **changes})


def text(number: int) -> Fill:
    def fill(contents: LayerContents) -> None:
        whole(contents)
        contents.text("data", f"{number}" * 100_000)

    return fill


async def test_an_image_is_pulled_with_the_nodes_login_and_described(
    tmp_path: Path, image_registry: ImageRegistry
) -> None:
    reference = push(image_registry, tmp_path / "layout")
    images = node(tmp_path, image_registry)
    with pytest.raises(BundleUnavailable, match="is not on this node"):
        images.layout(reference, tenant=TENANT)

    await images.ensure(reference, tenant=TENANT)
    layout = images.layout(reference, tenant=TENANT)
    digest = reference.rpartition(":")[2]
    assert layout.rootfs == tmp_path / "node/container-images" / TENANT / digest / "rootfs"
    assert layout.python == layout.rootfs / PYTHON[1:]
    assert layout.site == (layout.rootfs / "opt/pilotlight/site",)
    assert (layout.env, layout.rootfs_digest) == ({"A": "b", "PATH": "/bin"}, f"sha256:{digest}")
    assert images.present() == (f"{TENANT}/{digest}",)
    for place in ("pilotlight", "scratch", "dev", "proc", "sys", "run", "tmp", "var/tmp", "etc"):
        assert (layout.rootfs / place).is_dir()
    modes = {path.stat().st_mode & 0o222 for path in layout.rootfs.rglob("*")}
    assert modes == {0}, "nothing of it is writable"
    assert not list((tmp_path / "node/container-images" / TENANT).glob(".tmp-*"))


async def test_another_tenants_image_is_not_this_ones(
    tmp_path: Path, image_registry: ImageRegistry
) -> None:
    reference = push(image_registry, tmp_path / "layout")
    images = node(tmp_path, image_registry)
    await images.ensure(reference, tenant=TENANT)
    with pytest.raises(BundleUnavailable, match="is not on this node"):
        images.layout(reference, tenant=OTHER)


@pytest.mark.parametrize(
    "reference, tenant",
    [("no-reference", TENANT), ("r.example/a@sha256:" + "0" * 64, "../t-1"), ("r.example/a", "t")],
)
async def test_names_that_would_become_other_paths_are_refused(
    tmp_path: Path, reference: str, tenant: str
) -> None:
    images = node(tmp_path, None)
    with pytest.raises(BundleUnavailable):
        await images.ensure(reference, tenant=tenant)


async def test_without_a_login_the_registrys_refusal_is_told_and_not_tried_at_once_again(
    tmp_path: Path, image_registry: ImageRegistry
) -> None:
    clock = ManualClock()
    reference = push(image_registry, tmp_path / "layout")
    images = node(tmp_path, None, clock=clock)
    with pytest.raises(BundleUnavailable, match=re.escape("401: name a login for it")):
        await images.ensure(reference, tenant=TENANT)
    with pytest.raises(BundleUnavailable, match="failed a moment ago"):
        await images.ensure(reference, tenant=TENANT)
    clock.advance(301.0)
    with pytest.raises(BundleUnavailable, match="401"):
        await images.ensure(reference, tenant=TENANT)


@pytest.mark.parametrize("kind", ["manifest", "config", "layer"])
async def test_what_is_not_what_its_digest_says_is_not_unpacked(
    tmp_path: Path, image_registry: ImageRegistry, kind: str
) -> None:
    reference = push(image_registry, tmp_path / "layout", text(hash(kind)))
    manifest: dict[str, Any] = image_registry.manifest(reference)
    digest = {
        "manifest": reference.rpartition("@")[2],
        "config": manifest["config"]["digest"],
        "layer": manifest["layers"][0]["digest"],
    }[kind]
    (stored,) = image_registry.login.parent.glob(f"store/**/sha256/*/{digest[7:]}/data")
    raw = stored.read_bytes()
    stored.write_bytes(raw.replace(b'"linux"', b'"Linux"') + b" ")
    try:
        with pytest.raises(BundleUnavailable, match=r"sent another (document|blob)"):
            await node(tmp_path, image_registry).ensure(reference, tenant=TENANT)
    finally:
        stored.write_bytes(raw)
    assert not list((tmp_path / "node").rglob("rootfs"))


def linked(name: str, target: str) -> Fill:
    def fill(contents: LayerContents) -> None:
        whole(contents)
        contents.entries = {
            path: entry
            for path, entry in contents.entries.items()
            if not path.startswith(f"{name}/") and path != name
        }
        contents.link(name, target)

    return fill


@pytest.mark.parametrize(
    "fill, config, why",
    [
        (linked(PYTHON[1:], "/bin/sh"), {}, "symbolic link|Too many levels"),
        (linked("opt/pilotlight/site", "/root"), {}, "leads through a symbolic link"),
        (linked("opt/pilotlight/python/lib", "/usr/lib"), {}, "leads through a symbolic link"),
        (linked("proc", "/proc"), {}, "/proc is not a directory"),
        (linked("etc", "/etc"), {}, "/etc is not a directory"),
        (linked("pilotlight", "/root"), {}, "is below 'pilotlight', which is a link"),
        (whole, {"Entrypoint": ["/bin/sh"]}, "not the launcher|not made by"),
        (whole, {"Entrypoint": ["/opt/../root/python3.11", *LAUNCHER[1:]]}, "not made by"),
        (whole, {"Env": ["A"]}, "variables are invalid"),
    ],
)
async def test_an_image_whose_places_are_links_is_not_shown(
    tmp_path: Path, image_registry: ImageRegistry, fill: Fill, config: Any, why: str
) -> None:
    reference = push(image_registry, tmp_path / "layout", fill, **config)
    with pytest.raises(SnapshotterError, match=why.replace("'", ".")):
        await node(tmp_path, image_registry).ensure(reference, tenant=TENANT)
    assert not list((tmp_path / "node").rglob("rootfs"))


async def test_the_least_recently_used_image_that_nothing_uses_makes_room(
    tmp_path: Path, image_registry: ImageRegistry
) -> None:
    clock = ManualClock()
    pushed = [push(image_registry, tmp_path / f"l{n}", text(n)) for n in range(4)]
    names = [f"{TENANT}/{one.rpartition(':')[2]}" for one in pushed]
    images = node(tmp_path, image_registry, clock=clock, max_bytes=450_000)
    used = {names[0]}
    images.needed_by(lambda: used)
    for reference in pushed[:3]:
        await images.ensure(reference, tenant=TENANT)
        clock.advance(KEPT_S + 1)
    images._max_bytes = 1000
    with pytest.raises(BundleUnavailable, match=r"unpacks to more than|does not fit"):
        await images.ensure(pushed[3], tenant=TENANT)
    assert set(images.present()) == {names[0]}, "what is used stays, whatever is short"

    images._max_bytes = 450_000
    clock.advance(301.0)
    await images.ensure(pushed[3], tenant=TENANT)
    assert set(images.present()) == {names[0], names[3]}


async def test_the_disks_floor_is_kept_and_a_limit_of_zero_pulls_nothing(
    tmp_path: Path, image_registry: ImageRegistry
) -> None:
    reference = push(image_registry, tmp_path / "layout")
    for changes in ({"floor": DiskFloor(tmp_path, 1 << 60)}, {"max_bytes": 0}):
        with pytest.raises(BundleUnavailable, match=r"does not fit|max_bytes is 0"):
            await node(tmp_path, image_registry, **changes).ensure(reference, tenant=TENANT)
        assert not list((tmp_path / "node").rglob("rootfs"))


def test_the_images_in_use_are_those_of_launches() -> None:
    launch = LaunchSpec(
        revision=RevisionKey("f@v1"),
        trust_domain=TENANT,
        uid=None,
        bundle="",
        image="a" * 64,
        entry={},
        memory_bytes=1,
        cpu=1.0,
        startup_timeout_s=1.0,
        labels={"tenant": TENANT, CONTAINER_IMAGE_LABEL: f"r.example/f@sha256:{'b' * 64}"},
    )
    assert images_of([launch]) == {f"{TENANT}/{'b' * 64}"}

"""An image that begins with a container image of a registry: its files, its variables and its
Python; what a registry or a layer can not do."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pilotlight.core.disk_floor import no_floor
from pilotlight.packaging.archive import pack_files, pack_tree
from pilotlight.sdk.image import Image
from pilotlight.spec.record_json import to_json
from snapshotter.criu.bundle import make_bundle
from snapshotter.criu.processes import Criu
from snapshotter.criu.self_test import SelfTest
from snapshotter.errors import BundleUnavailable, ImageBuildFailed, Unsupported
from snapshotter.images.build_network import BuildNetwork, BuildNetworkPolicy
from snapshotter.images.images import Images
from snapshotter.images.oci import registry_base
from snapshotter.images.spec import parse_image
from tests.fakes.agent_home import AgentHome
from tests.fakes.base_image import MODULE, make_base_tree, push_tree
from tests.fakes.image_registry import image_registry, make_layout
from tests.fakes.slot_workshop import workshop
from tests.fakes.small_rootfs import HAS_APT
from tests.fakes.wheels import make_wheel

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
UID = 20001
PATH = "/usr/local/bin:/usr/bin:/bin"
as_root = pytest.mark.skipif(
    os.geteuid() != 0 or not HAS_APT, reason="root file systems are made as root, on Debian"
)


@pytest.fixture(scope="module")
def pushed(
    tmp_path_factory: pytest.TempPathFactory, require_or_skip: Callable[[str], NoReturn]
) -> Iterator[str]:
    """The name of an image in a registry without a login."""
    for program in ("skopeo", "docker-registry"):
        if shutil.which(program) is None:
            require_or_skip(f"{program} is not installed (scripts/install-system-packages test)")
    work = tmp_path_factory.mktemp("base")
    (work / "registry").mkdir()
    with image_registry(work / "registry", auth="{}") as registry:
        variables = {"PATH": PATH, "IN_BASE": "yes"}
        yield push_tree(make_base_tree(work), work, registry.host, "team/base", variables=variables)


@pytest.fixture(scope="module")
def wheels() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="plw", dir="/srv"))
    folder.chmod(0o755)
    make_wheel(folder, "plserver", "1.0")
    yield folder
    shutil.rmtree(folder)


def images_at(home: Path, wheels: Path) -> Images:
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }
    host = BuildNetworkPolicy(kind=BuildNetwork.HOST)  # the registry is on loopback
    return Images(home, environ=environ, requirements=["plserver==1.0"], network=host)


async def show(body: Any) -> None:
    print(body.get("text", ""))


def described(image: str, *commands: str, python: str = "") -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"op": "from", "image": image}]
    steps += [{"op": "run", "commands": list(commands)}] if commands else []
    return {"python": python, "steps": steps}


@as_root
@pytest.mark.root
@pytest.mark.slow  # an image is pushed, pulled and built; a dump and a restore
async def test_a_worker_runs_in_it_by_its_own_python_and_is_restored(
    short_tmp: Path, pushed: str, wheels: Path, criu: Criu, criu_proof: SelfTest
) -> None:
    look = (
        "id -u > /etc/mine; echo $IN_BASE >> /etc/mine",
        f"python3 -c 'import sys, {MODULE}; print(sys.base_prefix, {MODULE}.VALUE)' >> /etc/mine",
        "stat -c %a /tmp >> /etc/mine",
    )
    home = AgentHome(short_tmp)
    async with workshop(home, criu, criu_proof.kdat) as shop:
        shop.images = images_at(home.paths.home, wheels)
        shop.kit = await make_bundle(criu.binary, home.paths.home / "kit")
        digest = await shop.images.build(described(pushed, *look), uid=UID, part=show)
        layout = shop.images.layout(digest, uid=UID)
        assert layout.rootfs is not None
        assert layout.python == layout.rootfs / f"usr/local/bin/python{VERSION}"
        assert layout.env["IN_BASE"] == "yes"
        owners = {path.lstat().st_uid for path in layout.rootfs.rglob("*")}
        assert owners == {0}
        place = await shop.boot(image=digest, boot=["read:/etc/mine"])
        for at in (place, await shop.restore(await shop.dump(place))):
            running = await shop.start(at)
            assert await shop.ask(at, running, "/read/etc/mine") == ("0\nyes\n/usr/local 7\n1777\n")
            await shop.stop(running, at.slot)


@as_root
@pytest.mark.root
@pytest.mark.soak  # an image is pulled and built
async def test_a_dockerfile_is_built(short_tmp: Path, pushed: str, wheels: Path) -> None:
    (short_tmp / "data").mkdir()
    (short_tmp / "data/two.txt").write_text("two")
    (short_tmp / "one.txt").write_text("one ")
    (short_tmp / "Dockerfile").write_text(
        f"FROM {pushed}\nENV A='1 2'\nWORKDIR /app\nCOPY one.txt .\nCOPY data data/\n"
        f"RUN cat one.txt data/two.txt > out && \\\n  echo $A >> out\nWORKDIR sub\nRUN pwd > where"
    )
    home = short_tmp / "home"

    def pack(path: Path, name: str) -> str:
        packed = pack_tree(path) if path.is_dir() else pack_files({name: path})
        blob = home / "blobs" / packed.digest[:2] / packed.digest
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(packed.data)
        return packed.digest

    described_by_file = to_json(Image.from_dockerfile(short_tmp / "Dockerfile").spec(pack))
    images = images_at(home, wheels)
    layout = images.layout(await images.build(described_by_file, uid=UID, part=show), uid=UID)
    assert layout.rootfs is not None
    assert (layout.rootfs / "app/out").read_text() == "one two1 2\n"
    assert (layout.rootfs / "app/sub/where").read_text() == "/app/sub\n"
    assert layout.env["A"] == "1 2"


@as_root
@pytest.mark.root
@pytest.mark.slow  # an image is pulled
async def test_it_can_have_a_python_of_this_machine(
    short_tmp: Path, pushed: str, wheels: Path
) -> None:
    images = images_at(short_tmp / "home", wheels)
    digest = await images.build(described(pushed, python=VERSION), uid=UID, part=show)
    layout = images.layout(digest, uid=UID)
    assert layout.rootfs is not None
    assert not layout.python.is_relative_to(layout.rootfs)
    assert (layout.rootfs / f"usr/local/lib/python{VERSION}").is_dir()


@as_root
@pytest.mark.root
@pytest.mark.slow  # an image is pulled
async def test_steps_that_replace_its_python_by_a_link_are_refused(
    short_tmp: Path, pushed: str, wheels: Path
) -> None:
    images = images_at(short_tmp / "home", wheels)
    away = "cp -R /usr/local /opt/python && rm -r /usr/local && ln -s /opt/python /usr/local"
    with pytest.raises(ImageBuildFailed, match="usr/local"):
        await images.build(described(pushed, away), uid=UID, part=show)


@as_root
@pytest.mark.root
async def test_an_image_that_the_registry_does_not_have_is_named(
    short_tmp: Path, pushed: str, wheels: Path
) -> None:
    images = images_at(short_tmp / "home", wheels)
    missing = f"{pushed.removesuffix(':latest')}:nowhere"
    with pytest.raises(ImageBuildFailed, match=f"cannot get {missing} from its registry"):
        await images.build(described(missing), uid=UID, part=show)


@as_root
async def test_without_a_user_of_its_own_a_function_has_none(tmp_path: Path) -> None:
    images = Images(tmp_path, environ={"PATH": os.environ["PATH"]}, requirements=[])
    with pytest.raises(Unsupported, match="without users of their own"):
        await images.build(described("python:3.12-slim"), uid=None, part=show)


# -- what a registry sends -------------------------------------------------------------------------


def unpacked(tmp_path: Path) -> registry_base.RegistryBase:
    root = tmp_path / "root"
    return registry_base.unpack(tmp_path, "base", root, max_entries=100, floor=no_floor())


def test_a_blob_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    make_layout(tmp_path / "base", "x" * 100)
    blobs = tmp_path / "base/blobs/sha256"
    for blob in list(blobs.iterdir()):
        blob.rename(tmp_path / blob.name)
        blob.symlink_to(tmp_path / blob.name)
    with pytest.raises(OSError, match="symbolic link"):
        unpacked(tmp_path)


@pytest.mark.parametrize("name", ["index.json", "manifest"])
@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"manifests":[7]}'])
def test_documents_that_are_none_are_refused(tmp_path: Path, name: str, text: bytes) -> None:
    digest = make_layout(tmp_path / "base", "x")
    file = "index.json" if name == "index.json" else f"blobs/sha256/{digest[7:]}"
    (tmp_path / "base" / file).write_bytes(text)
    with pytest.raises(BundleUnavailable):
        unpacked(tmp_path)


def test_an_image_without_python_has_none(tmp_path: Path) -> None:
    make_layout(tmp_path / "base", "x")
    found = unpacked(tmp_path)
    assert (found.interpreter, found.variables) == (None, {})
    assert (tmp_path / "root/tmp").stat().st_mode & 0o7777 == 0o1777


@pytest.mark.parametrize(
    "image",
    ["", "-x", "python:", "a b", "../x", "python:3.12 --authfile=/x", "HTTP://x", "x@sha256:1", 7],
)
def test_what_is_no_name_of_an_image_is_refused(image: Any) -> None:
    with pytest.raises(ImageBuildFailed, match="is not the name of a container image"):
        parse_image(described(image))


def test_it_is_the_first_step_and_python_is_named_without_it() -> None:
    plan = parse_image(described("registry.example:5000/team/base@sha256:" + "a" * 64))
    assert (plan.python, plan.container_image[:26]) == ("", "registry.example:5000/team")
    step = {"op": "from", "image": "python:3.12-slim"}
    with pytest.raises(ImageBuildFailed, match="as its first step"):
        parse_image({"python": "3.11", "steps": [{"op": "pip", "packages": ["x"]}, step]})
    with pytest.raises(ImageBuildFailed, match="expected a version"):
        parse_image({"python": "", "steps": []})


@pytest.mark.parametrize(
    "image, is_plain",
    [
        ("127.0.0.1:5000/x", True),
        ("localhost:5000/x", True),
        ("python", False),
        ("r.example/x", False),
    ],
)
def test_only_a_registry_of_this_machine_is_spoken_to_without_tls(
    image: str, is_plain: bool
) -> None:
    command = registry_base.pull_command(image, Path("/tmp/base"))
    assert ("--src-tls-verify=false" in command) == is_plain
    assert command[-2:] == [f"docker://{image}", "oci:/tmp/base:base"]

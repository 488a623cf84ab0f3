"""An image that installs Debian packages has a root file system of its own: its steps are root
there and nowhere else, and root of the machine runs none of its files."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from snapshotter.criu.bundle import make_bundle
from snapshotter.criu.processes import Criu
from snapshotter.criu.self_test import SelfTest
from snapshotter.errors import ImageBuildFailed, Unsupported
from snapshotter.images import base_rootfs
from snapshotter.images.base_rootfs import (
    FIRST_ID,
    ID_COUNT,
    BaseRootfs,
    OnLines,
    Source,
    chosen_sources,
    packages_digest,
)
from snapshotter.images.images import Images
from snapshotter.images.pip_config import named_paths
from snapshotter.linux import slot_network
from snapshotter.shim.sandbox.root_directory import complete
from tests.fakes.agent_home import AgentHome
from tests.fakes.bare_images import with_empty_pip
from tests.fakes.slot_workshop import Place, Workshop, workshop
from tests.fakes.small_rootfs import HAS_APT, make_base
from tests.fakes.wheels import make_wheel

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
UID = 20077
needs_debian = pytest.mark.skipif(
    os.geteuid() != 0 or not HAS_APT, reason="root file systems are made as root, on Debian"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one base."""
    directory = tmp_path_factory.mktemp("bases")
    make_base(directory, tmp_path_factory.mktemp("work"))
    return directory


@pytest.fixture(scope="module")
def wheels() -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("root file systems are made as root")
    # of an image's own places none has it
    folder = Path(tempfile.mkdtemp(prefix="plw", dir="/srv"))
    folder.chmod(0o755)
    make_wheel(folder, "plserver", "1.0")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def environ(wheels: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }


@pytest.fixture(scope="module")
def bare_environ(
    environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """For builds that install nothing with pip."""
    return with_empty_pip(environ, tmp_path_factory.mktemp("cache"))


@pytest.fixture
async def images(short_tmp: Path, base: Path, environ: dict[str, str]) -> AsyncIterator[Images]:
    home = home_with(base, short_tmp / "home")
    yield Images(home, environ=environ, requirements=["plserver==1.0"])
    await slot_network.sweep()


@pytest.fixture
async def bare_images(
    short_tmp: Path, base: Path, bare_environ: dict[str, str]
) -> AsyncIterator[Images]:
    yield Images(home_with(base, short_tmp / "home"), environ=bare_environ, requirements=[])
    await slot_network.sweep()


def home_with(base: Path, home: Path) -> Path:
    (home / "node").mkdir(parents=True, exist_ok=True)
    (home / "node" / "rootfs").symlink_to(base)
    return home


class Lines:
    """Collects a build's output."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def __call__(self, body: Mapping[str, Any]) -> None:
        self.lines.append(str(body.get("text", "")))
        print(self.lines[-1])  # pytest shows it where a test fails

    async def tell(self, lines: Sequence[str]) -> None:
        self.lines += lines

    def after(self, word: str) -> str:
        """What is printed behind `word:`."""
        return (
            next(line for line in self.lines if line.startswith(f"{word}:"))
            .partition(":")[2]
            .strip()
        )


def described(*commands: str) -> dict[str, Any]:
    return {
        "python": VERSION,
        "steps": [
            {"op": "apt", "packages": ["plhello"]},
            {"op": "run", "commands": list(commands)},
        ],
    }


LOOK = (
    (
        "echo uid: $(id -u); echo said: $(plhello); echo owner: $(stat -c %u:%g /opt/plhello/owned); "
        "echo lent: $(ls $PIP_FIND_LINKS)"
    ),
    (
        "echo mount: $(mount -t tmpfs x /mnt 2>&1 || echo refused); echo space: $(unshare -Ur true "
        "2>&1 || echo refused)"
    ),
    (
        "echo root: $(chroot / id -u); echo host: $(ls /root /home /etc/shadow /proc/1/root/root 2>&1 "
        "| grep -c plsecret)"
    ),
    "echo dev: $(ls /dev); echo first: $(cat /proc/1/environ 2>&1 1>/dev/null || echo refused)",
    "echo made > /usr/share/made; chown 5:5 /usr/share/made",
)


@needs_debian
@pytest.mark.root
@pytest.mark.slow  # a whole image
async def test_steps_are_root_of_the_image_and_nobody_on_the_machine(images: Images) -> None:
    out = Lines()
    digest = await images.build(described(*LOOK), uid=UID, part=out)

    assert out.after("uid") == "0"
    assert out.after("said") == "hello from a package"
    assert out.after("owner") == "7:42"
    assert out.after("lent") == "plserver-1.0-py3-none-any.whl"
    assert "refused" in out.after("mount")
    assert "refused" in out.after("space")
    assert out.after("root") == "0"
    assert out.after("host") == "0"
    assert "Permission denied refused" in out.after("first")
    assert (
        out.after("dev") == "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"
    )
    layout = images.layout(digest, uid=UID)
    assert layout.rootfs is not None
    found = [layout.rootfs, *layout.rootfs.rglob("*")]
    assert {path.lstat().st_uid for path in found} == {0}
    assert not [path for path in found if not path.is_symlink() and path.stat().st_mode & 0o6022]
    assert (layout.rootfs / "usr/share/made").read_text() == "made\n"
    assert not (layout.rootfs / "var/lib/apt/lists").exists()
    names = (layout.rootfs / "etc/passwd").read_text().splitlines()
    assert names[-2:] == [
        "plhello:x:321:321::/nonexistent:/usr/sbin/nologin",
        f"function:x:{UID}:{UID}:function:/run/pilotlight/slot/work:/bin/sh",
    ]
    assert layout.rootfs_digest == packages_digest(layout.rootfs)


@needs_debian
@pytest.mark.root
@pytest.mark.slow  # two images
@pytest.mark.parametrize(
    "command, said",
    [
        (
            "mv /etc /etc.old && ln -s /root /etc",
            "/etc of the image is not a directory: an earlier step removed it",
        ),
        ("rm -rf /var && ln -s /root /var", "/var is not a directory"),
    ],
)
async def test_a_link_in_place_of_a_directory_is_refused_by_name(
    bare_images: Images, command: str, said: str
) -> None:
    before = sorted(os.listdir("/root"))
    out = Lines()
    with pytest.raises(ImageBuildFailed) as failure:
        await bare_images.build(described(command, "true"), uid=UID, part=out)
    assert said in "\n".join([str(failure.value), *out.lines])
    assert sorted(os.listdir("/root")) == before


@needs_debian
@pytest.mark.root
@pytest.mark.slow  # an image, a dump and a restore
async def test_a_worker_lives_in_it_and_comes_back_from_a_snapshot_by_the_machines_own_criu(
    short_tmp: Path, base: Path, bare_environ: dict[str, str], criu: Criu, criu_proof: SelfTest
) -> None:
    home = AgentHome(short_tmp)
    async with workshop(home, criu, criu_proof.kdat) as shop:
        node = home_with(base, home.paths.home)
        shop.images = Images(node, environ=bare_environ, requirements=[])
        shop.kit = await make_bundle(criu.binary, home.paths.home / "kit")
        planted = (
            "mkdir -p /usr/lib/criu && echo none > /usr/lib/criu/planted.so && echo "
            "/planted.so > /etc/ld.so.preload"
        )
        digest = await shop.images.build(
            described("echo mine > /etc/mine", planted), uid=20001, part=Lines()
        )
        place = await shop.boot(image=digest, boot=["read:/etc/mine", "read:/opt/plhello/owned"])
        assert await seen_from(shop, place) == ["mine\n", "owned\n"]
        again = await shop.restore(await shop.dump(place))
        assert await seen_from(shop, again) == ["mine\n", "owned\n"]


async def seen_from(shop: Workshop, place: Place) -> list[str]:
    """What an instance reads in two files of the image."""
    running = await shop.start(place)
    seen = [
        await shop.ask(place, running, f"/read{path}")
        for path in ("/etc/mine", "/opt/plhello/owned")
    ]
    await shop.stop(running, place.slot)
    return seen


@pytest.mark.parametrize("name", ["dev", "sys", "sys/devices/system", "var/tmp", "tmp"])
def test_what_is_mounted_on_is_a_directory_and_what_is_written_is_no_link(
    tmp_path: Path, name: str
) -> None:
    rootfs, outside = tmp_path / "rootfs", tmp_path / "outside"
    (rootfs / "etc").mkdir(parents=True)
    outside.write_text("mine")
    for file in ("passwd", "group", "resolv.conf", "ld.so.preload"):
        (rootfs / "etc" / file).symlink_to(outside)
    complete(str(rootfs), uid=UID, home="/home")
    assert outside.read_text() == "mine"
    assert (rootfs / "etc/passwd").read_text() == f"function:x:{UID}:{UID}:function:/home:/bin/sh\n"
    assert not (rootfs / "etc/ld.so.preload").is_symlink()

    shutil.rmtree(rootfs / name)
    (rootfs / name).symlink_to("/")
    with pytest.raises(
        ValueError, match=f"/{name} is not a directory: a step of the image replaced it"
    ):
        complete(str(rootfs), uid=UID, home="/home")


# -- decisions -------------------------------------------------------------------------------------


def test_packages_come_from_the_machines_own_distribution_and_release() -> None:
    text = (
        "https://mirror.example/debian/ bookworm main Debian\n"
        "https://me:secret@mirror.example/debian/ bookworm-updates main Debian\n"
        "https://mirror.example/debian/ trixie main Debian\n"
        "https://cuda.example/x/ bookworm main NVIDIA Corporation\n"
        "broken\n"
    )
    assert chosen_sources(text, distribution="debian", release="bookworm") == [
        Source(uri="https://mirror.example/debian/", release="bookworm", component="main"),
        Source(uri="https://mirror.example/debian/", release="bookworm-updates", component="main"),
    ]
    unread = (
        "https://mirror.example/debian/ bookworm main $(ORIGIN)\nhttps://other.example/ "
        "bookworm stable $(ORIGIN)\n"
    )
    (one,) = chosen_sources(unread, distribution="debian", release="bookworm")
    assert one.line == "deb https://mirror.example/debian/ bookworm main"
    assert chosen_sources("", distribution="debian", release="bookworm") == []


def test_images_in_the_making_share_no_ids(tmp_path: Path) -> None:
    async def run(*_: Any) -> int:
        raise AssertionError

    bases = BaseRootfs(tmp_path, run=run)
    first, second = bases.acquire_ids(), bases.acquire_ids()
    assert (first.start, len(first)) == (FIRST_ID, ID_COUNT)
    assert not set(first) & set(second)
    bases.release_ids(first)
    assert bases.acquire_ids() == first
    assert len({bases.acquire_ids().start for _ in range(254)}) == 254
    with pytest.raises(Unsupported, match="256 images with Debian packages are being built"):
        bases.acquire_ids()


class FakeMachine:
    """Runs debootstrap and cp of a test: the first waits to be let go, and fails when told to."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.status = 0
        self.made = 0

    async def __call__(self, argv: Sequence[str], on_lines: OnLines) -> int:
        if argv[0] == "/bin/cp":
            shutil.copytree(argv[-2], argv[-1], symlinks=True)
            return 0
        await on_lines(["I: Retrieving"])
        await self.may_end.wait()
        self.made += 1
        (Path(argv[-2]) / "usr/sbin").mkdir(parents=True)
        (Path(argv[-2]) / "etc").mkdir()
        (Path(argv[-2]) / "number").write_text(str(self.made))
        return self.status


@pytest.fixture
def bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[BaseRootfs, FakeMachine]:
    """Where debootstrap could run."""

    async def sources() -> list[Source]:
        return [Source(uri="https://mirror.example/debian", release="bookworm", component="main")]

    monkeypatch.setattr(base_rootfs, "why_not", lambda _: None)
    monkeypatch.setattr(base_rootfs, "release_name", lambda: "bookworm")
    monkeypatch.setattr(base_rootfs, "package_sources", sources)
    monkeypatch.setattr(base_rootfs, "shift_owners", lambda *_: None)
    machine = FakeMachine()
    return BaseRootfs(tmp_path / "bases", run=machine), machine


async def test_the_base_is_made_once_also_when_who_wanted_it_is_gone(
    bases: tuple[BaseRootfs, FakeMachine], tmp_path: Path
) -> None:
    base, machine = bases
    out = Lines()
    copies = [
        asyncio.create_task(base.copy(tmp_path / f"copy-{n}", base.acquire_ids(), out.tell))
        for n in range(3)
    ]
    while "I: Retrieving" not in out.lines:
        await asyncio.sleep(0.01)
    copies[0].cancel()
    await asyncio.wait(copies[:1])
    machine.may_end.set()
    await asyncio.gather(*copies[1:])
    await base.copy(tmp_path / "copy-3", base.acquire_ids(), out.tell)

    assert machine.made == 1
    assert not (tmp_path / "copy-0").exists()
    assert {(tmp_path / f"copy-{n}" / "number").read_text() for n in (1, 2, 3)} == {"1"}
    assert (
        tmp_path / "copy-1" / "etc/apt/sources.list"
    ).read_text() == "deb https://mirror.example/debian bookworm main\n"
    assert len(list((tmp_path / "bases").iterdir())) == 1


async def test_an_old_base_is_made_anew_and_kept_where_that_fails(
    bases: tuple[BaseRootfs, FakeMachine], tmp_path: Path
) -> None:
    base, machine = bases
    out = Lines()
    machine.may_end.set()
    for number, status, read in ((0, 0, "1"), (1, 1, "1"), (2, 0, "3")):
        machine.status = status
        await base.copy(tmp_path / f"copy-{number}", base.acquire_ids(), out.tell)
        assert (tmp_path / f"copy-{number}" / "number").read_text() == read
        (made,) = (tmp_path / "bases").iterdir()
        os.utime(made, (0, 0))


async def test_a_base_that_cannot_be_made_is_named_with_what_debootstrap_says(
    bases: tuple[BaseRootfs, FakeMachine], tmp_path: Path
) -> None:
    base, machine = bases
    machine.may_end.set()
    machine.status = 1
    with pytest.raises(
        Unsupported,
        match=r"debootstrap could not build bookworm from https://mirror\.example/debian",
    ):
        await base.copy(tmp_path / "copy", base.acquire_ids(), Lines().tell)
    assert list((tmp_path / "bases").iterdir()) == []


def test_the_packages_and_their_versions_are_the_digest(tmp_path: Path) -> None:
    digests = []
    for name, text in (
        ("a", "Package: x\nVersion: 1\n\nPackage: y\nVersion: 2\n"),
        ("b", "Package: y\nStatus: install ok installed\nVersion: 2\n\nPackage: x\nVersion: 1\n"),
        ("c", "Package: x\nVersion: 2\n\nPackage: y\nVersion: 2\n"),
    ):
        status = tmp_path / name / "var/lib/dpkg/status"
        status.parent.mkdir(parents=True)
        status.write_text(text)
        digests.append(packages_digest(tmp_path / name))
    assert digests[0] == digests[1] != digests[2]
    (tmp_path / "c/var/lib/dpkg/status").unlink()
    (tmp_path / "c/var/lib/dpkg/status").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="dpkg/status"):
        packages_digest(tmp_path / "c")


def test_paths_that_settings_of_pip_name_are_found(tmp_path: Path) -> None:
    index, constraints, wheels = (
        tmp_path / "index" / "simple",
        tmp_path / "constraints.txt",
        tmp_path / "wheels",
    )
    for directory in (index, wheels):
        directory.mkdir(parents=True)
    constraints.touch()
    texts = [
        f"[global]\nconstraint = {constraints}\n",
        f"https://a.example/simple file://{index}",
        f"{wheels} /not/there",
        "x/y",
    ]
    assert sorted(named_paths(texts)) == sorted([constraints, index.parent, wheels])


@pytest.mark.skipif(os.geteuid() == 0, reason="as a user")
async def test_without_root_a_package_must_be_on_the_machine(tmp_path: Path) -> None:
    images = Images(tmp_path, environ={"PATH": os.environ["PATH"]}, requirements=[])
    with pytest.raises(
        Unsupported,
        match="cannot install the apt packages plnowhere: the platform runs without root",
    ):
        await images.build(
            {"python": VERSION, "steps": [{"op": "apt", "packages": ["plnowhere"]}]},
            uid=None,
            part=Lines(),
        )

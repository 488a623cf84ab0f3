"""Images are built once, step by step, as the tenant's uid, and appear whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.object_store import blob_key, open_store
from snapshotter.errors import BundleUnavailable, ImageBuildFailed, SnapshotterError, Unsupported
from snapshotter.images.build_limits import BuildLimits
from snapshotter.images.images import Images, own_layout, runtime_requirements
from snapshotter.images.interpreters import (
    find_interpreter,
    installed_interpreters,
    own_interpreter,
)
from snapshotter.images.pip_config import (
    build_config,
    build_variables,
    has_credentials,
    without_credentials,
)
from snapshotter.images.spec import image_digest, parse_image
from snapshotter.linux import proc, slot_network
from snapshotter.linux.cgroups import Cgroups
from tests.fakes.bare_images import with_empty_pip
from tests.fakes.gpu_nodes import unassigned_majors
from tests.fakes.wheels import make_wheel

REPOSITORY = Path(__file__).parents[3]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
TENANT_UID = 20077
MIB = 1024 * 1024
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and other uids need root")


@pytest.fixture(scope="module")
def wheels() -> Iterator[Path]:
    """An index of three small packages; world-readable, as a tenant's build must read it."""
    folder = Path(tempfile.mkdtemp(prefix="plw", dir="/var/tmp"))  # a build sees a /tmp of its own
    folder.chmod(0o755)
    for version in ("1.0", "2.0"):
        make_wheel(folder, "plserver", version)
    make_wheel(folder, "plold", "1.0", requires="plserver<2")
    make_wheel(folder, "plmodel", "1.0")
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


@pytest.fixture
def images(tmp_path: Path, environ: dict[str, str]) -> Images:
    return Images(tmp_path, environ=environ, requirements=["plserver==2.0"])


@pytest.fixture(scope="module")
def bare_environ(
    environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """For builds that install nothing."""
    return with_empty_pip(environ, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def bare_images(tmp_path: Path, bare_environ: dict[str, str]) -> Images:
    """For tests of steps other than pip's."""
    return Images(tmp_path, environ=bare_environ, requirements=[])


def spec(*steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"python": VERSION, "steps": list(steps)}


class Parts:
    """Collects progress."""

    def __init__(self) -> None:
        self.seen: list[Mapping[str, Any]] = []
        self.first = asyncio.Event()

    async def __call__(self, body: Mapping[str, Any]) -> None:
        self.seen.append(body)
        self.first.set()


def put_tar(home: Path, files: Mapping[str, bytes]) -> str:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    digest = hashlib.sha256(packed.getvalue()).hexdigest()
    blob = home / "blobs" / digest[:2] / digest
    blob.parent.mkdir(parents=True)
    blob.write_bytes(packed.getvalue())
    return digest


def ask(images: Images, digest: str, code: str, *, uid: int | None = None) -> str:
    """Run `code` as a worker of the image would."""
    layout = images.layout(digest, uid=uid)
    program = f"import sys; sys.path[:0] = {[str(s) for s in layout.site]!r}; {code}"
    return subprocess.run(
        [layout.python, "-I", "-S", "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_no_image_is_the_platforms_own_interpreter() -> None:
    layout = own_layout()
    assert layout.prefix == Path(sys.base_prefix)
    assert layout.python.is_relative_to(layout.prefix)
    assert Path(pytest.__file__).parent.parent in layout.site


def test_unknown_image_is_unavailable(images: Images) -> None:
    for digest in ("0" * 64, "../../etc"):
        with pytest.raises(BundleUnavailable, match="is not on this node"):
            images.layout(digest)


def test_digest_is_the_canonical_json_of_the_description_as_given() -> None:
    assert (
        image_digest({"steps": [], "python": "3.11"})
        == hashlib.sha256(b'{"python":"3.11","steps":[]}').hexdigest()
    )


def test_runtime_requirements_are_pinned_to_the_platforms_own() -> None:
    assert all("==" in requirement for requirement in runtime_requirements())


@pytest.mark.parametrize(
    "body, said",
    [
        ({"python": 3.11}, "python = 3.11: expected a version"),
        ({"python": "3.9"}, "too old"),
        ({"python": "3.11", "steps": {}}, "expected a list"),
        ({"python": "3.11", "steps": [{"op": "brew"}]}, "whose op is one of"),
        ({"python": "3.11", "steps": [{"op": "pip", "pakages": []}]}, "unknown key 'pakages'"),
        ({"python": "3.11", "steps": [{"op": "pip", "packages": ["--user"]}]}, "put options into"),
        (
            {"python": "3.11", "steps": [{"op": "apt", "packages": ["a; rm -rf /"]}]},
            "not the name of a Debian package",
        ),
        (
            {"python": "3.11", "steps": [{"op": "apt", "packages": ["criu-"]}]},
            "not the name of a Debian package",
        ),
        (
            {"python": "3.11", "steps": [{"op": "run", "commands": "ls"}]},
            "expected a list of strings",
        ),
        (
            {"python": "3.11", "steps": [{"op": "copy", "blob": "x", "target": "/usr/x"}]},
            "which is the system's",
        ),
        (
            {"python": "3.11", "steps": [{"op": "copy", "blob": "x", "target": "../x"}]},
            "must not have",
        ),
        (
            {"python": "3.11", "steps": [{"op": "env", "values": {"A=B": "x"}}]},
            "variable names",
        ),
    ],
)
def test_wrong_description_names_what_is_wrong(body: dict[str, Any], said: str) -> None:
    with pytest.raises(SnapshotterError, match=said):
        parse_image(body)


async def test_interpreter_that_is_not_there_is_refused_with_those_that_are(images: Images) -> None:
    with pytest.raises(
        Unsupported, match=rf"no Python 3\.99 on this machine; installed: .*{VERSION}"
    ):
        await images.build({"python": "3.99", "steps": []}, uid=None, part=Parts())


async def test_interpreters_are_known_by_their_installation() -> None:
    assert await find_interpreter(VERSION, os.environ) == own_interpreter()
    for interpreter in await installed_interpreters(os.environ):
        assert interpreter.executable.is_relative_to(interpreter.prefix)


def test_pips_configuration_passes_through_without_places_to_install_to(tmp_path: Path) -> None:
    (tmp_path / ".config" / "pip").mkdir(parents=True)
    (tmp_path / ".config" / "pip" / "pip.conf").write_text(
        "[global]\nfind-links = /a\ntimeout = 5\n"
    )
    (tmp_path / "chosen.conf").write_text("[global]\nfind-links = /b\n")
    environ = {
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": str(tmp_path / "chosen.conf"),
        "PIP_TARGET": "/x",
        "PIP_CERT": "/c",
        "SECRET": "s",
    }
    assert build_config(environ, global_files=()) == "[global]\nfind-links = /b\ntimeout = 5\n\n"
    variables = build_variables({**environ, "HTTPS_PROXY": "p"})
    assert (variables["PIP_CERT"], variables["HTTPS_PROXY"], variables["PIP_NO_CACHE_DIR"]) == (
        "/c",
        "p",
        "1",
    )
    assert not {"PIP_TARGET", "SECRET", "PIP_CONFIG_FILE"} & variables.keys()


def test_pips_configuration_reaches_a_build_without_credentials(tmp_path: Path) -> None:
    (tmp_path / "global.conf").write_text(
        "[global]\nindex-url = https://operator:word@packages.example/simple\nclient-cert = "
        "/key.pem\n"
    )
    (tmp_path / "user.conf").write_text(
        "[global]\nextra-index-url =\n  https://token@one.example/simple\n  "
        "https://two.example/s?key=word\nkeyring-provider = import\n"
    )
    environ = {
        "PIP_CONFIG_FILE": str(tmp_path / "user.conf"),
        "PIP_INDEX_URL": "https://operator:w@rd@packages.example/simple",
        "PIP_CLIENT_CERT": "/key.pem",
        "PIP_KEYRING_PROVIDER": "subprocess",
        "PIP_PROXY": "operator:word@proxy.example:3128",
        "https_proxy": "http://operator:word@proxy.example:3128",
        "NETRC": "/netrc",
        "HOME": "/nonexistent",
    }
    variables = build_variables(environ)
    config = build_config(environ, global_files=(tmp_path / "global.conf",))
    said = f"{variables} {config}"
    assert not [
        word
        for word in (
            "operator",
            "word",
            "w@rd",
            "token",
            "key.pem",
            "import",
            "subprocess",
            "netrc",
        )
        if word in said
    ]
    assert variables["PIP_INDEX_URL"] == "https://packages.example/simple"
    assert (variables["PIP_PROXY"], variables["https_proxy"]) == (
        "proxy.example:3128",
        "http://proxy.example:3128",
    )
    assert variables["PIP_KEYRING_PROVIDER"] == "disabled"
    for line in (
        "index-url = https://packages.example/simple",
        "https://one.example/simple",
        "https://two.example/s",
    ):
        assert line in config
    assert has_credentials(environ, global_files=())
    assert has_credentials({}, global_files=(tmp_path / "global.conf",))
    assert not has_credentials(
        {"PIP_INDEX_URL": "https://packages.example/simple", "HOME": "/nonexistent"},
        global_files=(),
    )


@pytest.mark.parametrize(
    "text",
    [
        "https://packages.example/simple#sha256=1",
        "/wheels/a@b",
        "file:///wheels",
        "name@host.example/x",
        "",
    ],
)
def test_addresses_without_credentials_stay_as_they_are(text: str) -> None:
    assert without_credentials(text) == text.removeprefix("name@")


@pytest.mark.slow
@pytest.mark.parametrize(
    "uid", [None, pytest.param(TENANT_UID, marks=[needs_root, pytest.mark.root])]
)
async def test_steps_run_in_order_and_the_image_serves(
    tmp_path: Path, images: Images, uid: int | None
) -> None:
    blob = put_tar(tmp_path, {"helper.py": b"said = 'copied'"})
    steps: list[dict[str, Any]] = [
        {"op": "pip", "packages": ["plmodel"], "options": ["--no-deps"]},
        {"op": "copy", "blob": blob, "target": "mine"},
        {"op": "copy", "blob": blob, "target": "mine/deep"},
        {"op": "copy", "blob": blob, "target": "."},
        {"op": "copy", "blob": blob, "target": "/root"},
        {"op": "copy", "blob": blob, "target": "/data/deep"},
        {"op": "env", "values": {"GREETING": "hello"}},
        # as a user of its own it gets a root file system
        *([{"op": "apt", "packages": ["coreutils"]}] if uid is None else []),
        {
            "op": "run",
            "commands": [
                "echo $GREETING $(id -u) $(ls mine) > made.txt",
                "pip --version && pip3 check",
                f"cat {tmp_path}/blobs/{blob[:2]}/{blob} || true",
            ],
        },
    ]
    parts = Parts()
    digest = await images.build(spec(*steps), uid=uid, part=parts)
    assert digest == image_digest(spec(*steps))
    assert (
        ask(
            images,
            digest,
            "import plmodel, plserver, mine.helper as h, mine.deep.helper, helper; "
            "print(plmodel.version, plserver.version, h.said)",
            uid=uid,
        )
        == "1.0 2.0 copied"
    )
    root = tmp_path / "node" / "images" / (digest if uid is None else f"{digest}-{uid}")
    layout = images.layout(digest, uid=uid)
    assert (layout.env, layout.files, layout.links) == (
        {"GREETING": "hello"},
        root / "files",
        ("data",),
    )
    assert (root / "files/.absolute/data/deep/helper.py").is_file()
    assert (
        root / "files" / "made.txt"
    ).read_text() == f"hello {os.geteuid() if uid is None else uid} deep helper.py\n"
    assert not [
        p
        for p in [root, *root.rglob("*")]
        if p.lstat().st_uid != os.geteuid() or (not p.is_symlink() and p.stat().st_mode & 0o022)
    ]
    order = list(dict.fromkeys(part["step"] for part in parts.seen))
    assert order[:2] == ["virtual environment", "pip install plmodel"]
    assert order[-1] == "runtime"
    assert {part["of"] for part in parts.seen} == {len(steps) + 2}
    assert any(part.get("text", "").startswith("pip ") for part in parts.seen), (
        "pip is a command of the environment"
    )
    if uid is not None:
        assert any(part.get("text", "").startswith("cat: ") for part in parts.seen), (
            "the tenant's build must not see the blob store"
        )
    again = Parts()
    assert await images.build(spec(*steps), uid=uid, part=again) == digest
    assert again.seen == []
    assert images.prune(set()) == [digest]
    assert list((tmp_path / "node" / "images").iterdir()) == []


@pytest.mark.slow
async def test_copy_steps_are_fetched_from_a_bucket(
    tmp_path: Path, environ: dict[str, str], s3_bucket: str
) -> None:
    blob = put_tar(tmp_path, {"helper.py": b"said = 'copied'"})
    step = {"op": "copy", "blob": blob, "target": "mine"}
    async with contextlib.aclosing(
        open_store(f"s3://{s3_bucket}/blobs", setting="platform.blobs")
    ) as store:
        images = Images(
            tmp_path / "home", blobs=store, environ=environ, requirements=["plserver==2.0"]
        )
        with pytest.raises(ImageBuildFailed, match="is not in the blob store: deploy again"):
            await images.build(spec(step), uid=None, part=Parts())
        await store.put_file(blob_key(blob), tmp_path / "blobs" / blob[:2] / blob)
        digest = await images.build(spec(step), uid=None, part=Parts())
        assert ask(images, digest, "import mine.helper as h; print(h.said)") == "copied"
        assert sorted(p.name for p in images.layout(digest).site[0].parents[3].iterdir()) == [
            "env",
            "files",
            "image.json",
        ]


@pytest.mark.slow
@needs_root
@pytest.mark.root
async def test_a_build_is_confined_like_a_worker(bare_images: Images) -> None:
    mark = f"pl-build-{os.getpid()}"
    commands = [
        "! unshare -Ur true",
        "grep -q 'Seccomp:.2' /proc/self/status",
        f"for d in /var/tmp /run/lock /dev/shm; do touch $d/{mark} || true; done",
        # of the machine it sees what workers see, and /etc
        f"! test -e {Path(__file__)}",
        "! ls -d /var/* /root/* /home/* /opt/* /srv/* /work/* 2> /dev/null",
    ]
    await bare_images.build(spec({"op": "run", "commands": commands}), uid=TENANT_UID, part=Parts())

    assert not [d for d in ("/var/tmp", "/run/lock", "/dev/shm") if os.path.exists(f"{d}/{mark}")]


@pytest.mark.slow
async def test_one_file_of_a_build_is_bounded(tmp_path: Path, bare_environ: dict[str, str]) -> None:
    images = Images(
        tmp_path, environ=bare_environ, requirements=[], bounds=BuildLimits(file_bytes=64 * MIB)
    )
    commands = ["truncate -s 63M small", "truncate -s 65M large"]
    with pytest.raises(ImageBuildFailed) as failed:
        await images.build(spec({"op": "run", "commands": commands}), uid=None, part=Parts())

    assert "File too large" in failed.value.detail["log_tail"][-1]


@pytest.fixture
def cgroups(tmp_path: Path) -> Iterator[Cgroups]:
    found = Cgroups.find(tmp_path)
    if not (found.limits_memory and found.limits_pids):
        pytest.skip(f"needs cgroups: {found.why_not}")
    yield found
    assert found.names() == set()  # whatever a build started is gone
    found.remove_empty()


@needs_root
@pytest.mark.slow
async def test_a_build_has_a_cgroup_of_its_own_with_bounds(
    tmp_path: Path, bare_environ: dict[str, str], cgroups: Cgroups
) -> None:
    images = Images(tmp_path, environ=bare_environ, requirements=[], cgroups=cgroups)
    description = spec(
        {"op": "run", "commands": ["cat /proc/self/cgroup", "sleep 1000 > /dev/null 2>&1 &"]}
    )
    name = f"b-{image_digest(description)[:16]}-{TENANT_UID}"
    bounds: set[str] = set()

    async def look(body: Mapping[str, Any]) -> None:
        if name in body.get("text", ""):
            bounds.add((cgroups.group(name).directories["pids"] / "pids.max").read_text())

    await images.build(description, uid=TENANT_UID, part=look)

    assert bounds == {"1024\n"}


@needs_root
@pytest.mark.slow
async def test_a_build_opens_no_device_of_the_machine(
    tmp_path: Path, bare_environ: dict[str, str], cgroups: Cgroups
) -> None:
    """Neither in /dev, nor by a world-writable node that it finds elsewhere."""
    if not cgroups.controls_devices:
        pytest.skip(f"needs cgroups: {cgroups.why_no_devices}")
    images = Images(tmp_path, environ=bare_environ, requirements=[], cgroups=cgroups)
    directory = Path(tempfile.mkdtemp(prefix="pl", dir="/usr/local"))
    try:
        directory.chmod(0o755)
        node = directory / "nvidia0"
        os.mknod(node, 0o20666, os.makedev(unassigned_majors()[0], 0))
        node.chmod(0o666)
        shown = "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"
        commands = [
            f'test "$(ls /dev | tr "\\n" " ")" = "{shown} "',
            'test -z "$(ls -A /proc/driver)"',
            "echo written > /dev/null",
            f"(: < {node}) 2>&1 | grep 'Operation not permitted'",
        ]
        await images.build(spec({"op": "run", "commands": commands}), uid=TENANT_UID, part=Parts())
        with pytest.raises(OSError, match="No such device or address"):
            node.open("rb")  # of a process outside of a group
    finally:
        shutil.rmtree(directory)


@needs_root
@pytest.mark.slow
async def test_a_build_says_what_it_has_used_however_it_ends(
    tmp_path: Path, environ: dict[str, str], cgroups: Cgroups
) -> None:
    images = Images(tmp_path, environ=environ, requirements=[], cgroups=cgroups)
    parts = Parts()
    burn = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; exit 7"
    with pytest.raises(ImageBuildFailed, match="exited with status 7"):
        await images.build(spec({"op": "run", "commands": [burn]}), uid=TENANT_UID, part=parts)
    used = [body for body in parts.seen if "cpu_ns" in body]
    assert used[-1]["cpu_ns"] > 100_000_000, "the loop, and the virtual environment before it"
    assert len({body["build"] for body in used}) == 1


@needs_root
@pytest.mark.slow
async def test_a_build_that_takes_too_much_memory_is_ended_and_told_why(
    tmp_path: Path, bare_environ: dict[str, str], cgroups: Cgroups
) -> None:
    images = Images(
        tmp_path,
        environ=bare_environ,
        requirements=[],
        cgroups=cgroups,
        bounds=BuildLimits(memory_bytes=192 * MIB),
    )
    commands = ["python -c 'print(len(bytearray(400 << 20)))'"]
    with pytest.raises(ImageBuildFailed, match="ran out of memory"):
        await images.build(spec({"op": "run", "commands": commands}), uid=TENANT_UID, part=Parts())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 MiB of its own."""
    where = tmp_path / "disk"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160M,mode=755", "tmpfs", where], check=True)
    yield where
    subprocess.run(["umount", "--lazy", where], check=True)


@needs_root
@pytest.mark.slow
async def test_build_that_fills_the_disk_is_ended_at_the_floor_and_leaves_the_rest_to_journals(
    small_disk: Path, bare_environ: dict[str, str]
) -> None:
    floor = DiskFloor(small_disk, 64 * MIB)
    images = Images(
        small_disk, environ=bare_environ, requirements=[], bounds=BuildLimits(floor=floor)
    )
    commands = [
        "for n in $(seq 60); do head -c 2M /dev/zero > fill-$n; sleep 0.1; done",
        "sleep 60",
    ]
    with pytest.raises(
        ImageBuildFailed, match=r"platform\.disk_floor_bytes keeps 67108864 for the journals"
    ):
        await images.build(spec({"op": "run", "commands": commands}), uid=TENANT_UID, part=Parts())
    assert floor.missing_bytes() == 0, "what was half built is gone"
    (small_disk / "journal").write_bytes(b"j" * 100 * MIB)
    with pytest.raises(ImageBuildFailed, match="disk_floor_bytes"):
        await images.build(spec(), uid=TENANT_UID, part=Parts())
    with (small_disk / "journal").open("ab") as journal:
        assert journal.write(b"j" * MIB) == MIB, "a journal goes on below the floor"


@pytest.fixture
def few_inodes(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for 20,000 files."""
    where = tmp_path / "disk"
    where.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160M,nr_inodes=20000,mode=755", "tmpfs", where],
        check=True,
    )
    yield where
    subprocess.run(["umount", "--lazy", where], check=True)


@needs_root
@pytest.mark.slow
async def test_build_that_makes_files_without_end_is_ended_while_inodes_are_left(
    few_inodes: Path, bare_environ: dict[str, str]
) -> None:
    bounds = BuildLimits(floor=DiskFloor(few_inodes, MIB))
    images = Images(few_inodes, environ=bare_environ, requirements=[], bounds=bounds)
    # in no hurry with the last ones: on a busy machine the next look at the disk may come late
    pause = 'time.sleep(0.0005 if os.statvfs(".").f_favail > 1900 else 0.05)'
    make = (
        f'python -c \'import os, time; [open(str(n), "w").close() or {pause} for n in '
        f"range(30000)]'"
    )
    with pytest.raises(ImageBuildFailed, match="inodes are free"):
        await images.build(spec({"op": "run", "commands": [make]}), uid=TENANT_UID, part=Parts())
    assert os.statvfs(few_inodes).f_favail > 19_000, "what was half built is gone"


@pytest.mark.slow
async def test_image_of_too_many_entries_is_refused_with_the_bound_and_the_way_out(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    images = Images(tmp_path, environ=environ, requirements=[], bounds=BuildLimits(entries=500))
    with pytest.raises(
        ImageBuildFailed,
        match="more than 500 files, directories and links, the limit of one image: remove what",
    ):
        await images.build(spec(), uid=None, part=Parts())
    assert [p.suffix for p in (tmp_path / "node" / "images").iterdir()] == [".log"]


@pytest.mark.slow
async def test_image_is_measured_and_deleted(tmp_path: Path, bare_images: Images) -> None:
    digest = await bare_images.build(
        spec({"op": "run", "commands": ["head -c 3000000 /dev/zero > fill"]}),
        uid=None,
        part=Parts(),
    )
    assert 3_000_000 < bare_images.size_bytes(digest) < 100_000_000
    assert bare_images.delete(digest) > 3_000_000
    assert (bare_images.size_bytes(digest), bare_images.delete(digest)) == (0, 0)
    assert bare_images.delete("../../elsewhere") == 0
    with pytest.raises(BundleUnavailable):
        bare_images.layout(digest)


@pytest.mark.slow
@needs_root
@pytest.mark.root
async def test_steps_see_what_was_copied_to_an_absolute_path(
    tmp_path: Path, bare_images: Images
) -> None:
    """Below a directory that the machine has as below one that it has not."""
    before = [os.path.lexists(path) for path in ("/data", "/mnt", "/other")]
    blob = put_tar(tmp_path, {"helper.py": b"said = 'copied'"})
    targets = ("/data/deep", "/mnt/deep")
    steps: list[dict[str, Any]] = [
        *({"op": "copy", "blob": blob, "target": target} for target in targets),
        {
            "op": "run",
            "commands": [
                *(f"cat {target}/helper.py >> seen" for target in targets),
                *(f"echo 7 > {target}/made" for target in targets),
            ],
        },
        {"op": "copy", "blob": blob, "target": "/other"},
        {
            "op": "run",
            "commands": [
                f"cat /other/helper.py {' '.join(f'{target}/made' for target in targets)} >> seen",
                "ls -A / > root; head -c 4 /dev/zero | wc -c >> seen; id -u >> seen",
                "touch /new 2> denied; echo $$ $(ls /proc | grep -c '^[0-9]') > processes",
            ],
        },
    ]
    digest = await bare_images.build(spec(*steps), uid=TENANT_UID, part=Parts())

    layout = bare_images.layout(digest, uid=TENANT_UID)
    assert layout.files is not None
    assert sorted(layout.links) == ["data", "mnt", "other"]
    seen = (layout.files / "seen").read_text()
    copied = "said = 'copied'"
    assert seen == f"{copied}{copied}{copied}7\n7\n4\n{TENANT_UID}\n"
    for target in targets:
        assert (layout.files / f".absolute{target}/made").read_text() == "7\n"
    assert set(os.listdir("/")) - {"data", "mnt", "other"} <= set(
        (layout.files / "root").read_text().split("\n")
    )
    assert "denied" in (layout.files / "denied").read_text()
    assert int((layout.files / "processes").read_text().split()[1]) < 10
    # the machine's own root directory is as it was
    assert [os.path.lexists(path) for path in ("/data", "/mnt", "/other")] == before


@pytest.mark.slow
@needs_root
@pytest.mark.root
async def test_pip_installs_what_was_copied_to_an_absolute_path(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    images = Images(tmp_path, environ=environ, requirements=[])
    make_wheel(tmp_path, "plcopied", "3.0")
    (wheel,) = tmp_path.glob("plcopied-*.whl")
    blob = put_tar(tmp_path, {wheel.name: wheel.read_bytes()})
    steps: list[dict[str, Any]] = [
        {"op": "copy", "blob": blob, "target": "/wheels"},
        {"op": "pip", "packages": [f"/wheels/{wheel.name}"], "options": ["--no-deps"]},
    ]
    digest = await images.build(spec(*steps), uid=TENANT_UID, part=Parts())
    code = "import plcopied; print(plcopied.version)"
    assert ask(images, digest, code, uid=TENANT_UID) == "3.0"


@pytest.mark.slow
async def test_failed_step_leaves_its_log_and_no_image(tmp_path: Path, bare_images: Images) -> None:
    blob = put_tar(tmp_path, {"helper.py": b"said = 'copied'"})
    command = "cat /data/helper.py; echo about to fail; exit 7"
    broken = spec(
        {"op": "copy", "blob": blob, "target": "/data"}, {"op": "run", "commands": [command]}
    )
    with pytest.raises(
        ImageBuildFailed,
        match=f"step 3 of 4 failed: run {command}: exited with status 7; what was copied to /data "
        f"is there in instances only: copy it to a relative path",
    ) as caught:
        await bare_images.build(broken, uid=None, part=Parts())
    assert "about to fail" in caught.value.detail["log_tail"]
    assert [p.name for p in (tmp_path / "node" / "images").iterdir()] == [
        f"{image_digest(broken)}.log"
    ]
    assert (
        (tmp_path / "node" / "images" / f"{image_digest(broken)}.log")
        .read_text()
        .endswith("about to fail\n")
    )


@pytest.mark.slow
async def test_failed_step_that_printed_long_lines_has_an_error_that_can_be_sent(
    bare_images: Images,
) -> None:
    commands = [
        "i=0; while [ $i -lt 45 ]; do head -c 65000 /dev/zero; echo; i=$((i+1)); done; exit 1"
    ]
    with pytest.raises(ImageBuildFailed, match="exited with status 1") as caught:
        await bare_images.build(spec({"op": "run", "commands": commands}), uid=None, part=Parts())
    assert 1000 < len(json.dumps(caught.value.detail)) < 100_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "package, named",
    [
        ("plserver==1.0", ["plserver==1.0", "plserver==2.0"]),
        ("plold", ["plold 1.0", "plserver<2", "plserver 2.0"]),
    ],
)
async def test_conflict_with_the_workers_requirements_names_both(
    images: Images, package: str, named: list[str]
) -> None:
    with pytest.raises(ImageBuildFailed, match="conflicts with the platform's worker") as caught:
        await images.build(spec({"op": "pip", "packages": [package]}), uid=None, part=Parts())
    assert caught.value.detail["step"] == "runtime"
    assert all(text in str(caught.value) for text in named)


async def test_missing_blob_fails_before_anything_is_made(images: Images) -> None:
    with pytest.raises(ImageBuildFailed, match="not in the blob store"):
        await images.build(
            spec({"op": "copy", "blob": "0" * 64, "target": "x"}), uid=None, part=Parts()
        )


@pytest.mark.slow
async def test_callers_share_one_build_and_the_last_to_leave_ends_it(
    tmp_path: Path, bare_images: Images
) -> None:
    forever = spec({"op": "run", "commands": ["sleep 1000"]})
    parts = [Parts(), Parts()]
    callers = [asyncio.create_task(bare_images.build(forever, uid=None, part=p)) for p in parts]
    await asyncio.gather(*(p.first.wait() for p in parts))
    assert repr(bare_images).endswith("building=1>")
    callers[0].cancel()
    await asyncio.wait([callers[0]])
    assert repr(bare_images).endswith("building=1>")
    callers[1].cancel()
    await asyncio.wait([callers[1]])
    assert repr(bare_images).endswith("building=0>")
    assert [p.suffix for p in (tmp_path / "node" / "images").iterdir()] == [".log"]


@pytest.mark.slow
async def test_build_that_takes_too_long_is_ended(tmp_path: Path, environ: dict[str, str]) -> None:
    hasty = Images(tmp_path, environ=environ, requirements=[], bounds=BuildLimits(timeout_s=0.05))
    with pytest.raises(ImageBuildFailed, match=r"longer than 0\.05 s"):
        await hasty.build(spec(), uid=None, part=Parts())


_CHILD = """
import asyncio, json, os, sys
from pathlib import Path
from snapshotter.images.images import Images
async def part(body): print(body.get("text", ""), flush=True)
images = Images(Path(sys.argv[1]), environ=dict(os.environ), requirements=[])
asyncio.run(images.build(json.loads(sys.argv[2]), uid=int(sys.argv[3]) or None, part=part))
"""


@pytest.fixture
async def builder(
    tmp_path: Path, environ: dict[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of its own that builds an image and comes to sleep in it."""
    body = json.dumps(spec({"op": "run", "commands": ["echo asleep $$; sleep 1000"]}))
    uid = TENANT_UID if os.geteuid() == 0 else 0
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CHILD, str(tmp_path), body, str(uid)),
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
        env=environ,
    )
    yield child
    if child.returncode is None:
        child.kill()
    await child.wait()
    await slot_network.sweep()


def is_alive(pid: int) -> bool:
    """Whether it runs; one whose end nobody has read does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
async def test_killed_builder_takes_its_steps_along_and_is_cleaned_up_after(
    tmp_path: Path, bare_images: Images, builder: asyncio.subprocess.Process
) -> None:
    assert builder.stdout is not None
    while not (await builder.stdout.readline()).startswith(b"asleep"):
        pass
    root = tmp_path / "node" / "images"
    assert len(list(root.glob(".tmp-*"))) == 1
    started = proc.process_tree(builder.pid)
    assert len(started) > 2
    builder.send_signal(signal.SIGKILL)
    await builder.wait()
    while any(is_alive(pid) for pid in started):
        await asyncio.sleep(0.01)
    with pytest.raises(ImageBuildFailed):
        await bare_images.build(spec({"op": "run", "commands": ["exit 1"]}), uid=None, part=Parts())
    assert list(root.glob(".tmp-*")) == []
    assert not [p for p in root.iterdir() if p.suffix != ".log"]

"""A tenant whose code runs in an image build gains nothing outside of it: no file of root's, no
socket, no process that stays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from snapshotter.errors import BundleUnavailable, ImageBuildFailed, Unsupported
from snapshotter.images.build_network import (
    BuildNetwork,
    BuildNetworkPolicy,
    is_on_loopback,
    joined,
)
from snapshotter.images.images import Images, disk_bytes
from snapshotter.linux import net_commands, slot_network
from snapshotter.linux.atomic_directory import TooManyEntries, freeze, remove_tree
from tests.fakes.bare_images import with_empty_pip
from tests.fakes.host_address import host_address
from tests.fakes.wheels import make_wheel

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
TENANT_UID = 20077
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and other uids need root")
ATTEMPTS_CPU_S = 0.5
"""How long a race is tried, by this process's own time: on a busy machine that is as many attempts.
Without the protection it is lost in some 0.1 s."""

_SWAP = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
os.chdir(sys.argv[1])
print("swapping", flush=True)
while os.getppid() == int(sys.argv[2]):
    libc.renameat2(-100, b"tree/name", -100, b"link", 2)  # RENAME_EXCHANGE
"""


@pytest.fixture
def index() -> Iterator[Path]:
    """A directory with one package; world-readable, outside /tmp, which a build has of its own."""
    folder = Path(tempfile.mkdtemp(prefix="plw", dir="/var/tmp"))
    folder.chmod(0o755)
    make_wheel(folder, "plserver", "1.0")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def environ(index: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
    }


@pytest.fixture
async def images(tmp_path: Path, environ: dict[str, str]) -> AsyncIterator[Images]:
    yield Images(tmp_path, environ=environ, requirements=["plserver==1.0"])
    await slot_network.sweep()


@pytest.fixture
def bare_environ(environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return with_empty_pip(environ, tmp_path / "cache")


@pytest.fixture
async def bare_images(tmp_path: Path, bare_environ: dict[str, str]) -> AsyncIterator[Images]:
    """For builds that install nothing."""
    yield Images(tmp_path, environ=bare_environ, requirements=[])
    await slot_network.sweep()


def run_step(*commands: str) -> dict[str, Any]:
    return {"python": VERSION, "steps": [{"op": "run", "commands": list(commands)}]}


class Output:
    """Collects a build's lines, and says when one has come."""

    def __init__(self, awaited: str = "") -> None:
        self.lines: list[str] = []
        self.seen = asyncio.Event()
        self._awaited = awaited

    async def __call__(self, body: Mapping[str, Any]) -> None:
        self.lines.append(body.get("text", ""))
        if body.get("text", "") == self._awaited:
            self.seen.set()


# -- links that appear while root works ------------------------------------------------------------


@contextlib.contextmanager
def swapping(folder: Path) -> Iterator[None]:
    """A process that exchanges `tree/name` and `link` in `folder` without pause."""
    command = [sys.executable, "-c", _SWAP, str(folder), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield
        finally:
            child.kill()


def attempt(work: Callable[[], object], *, until: Callable[[], bool]) -> None:
    end = time.process_time() + ATTEMPTS_CPU_S
    while time.process_time() < end and not until():
        with contextlib.suppress(OSError, ValueError):
            work()


@pytest.mark.slow  # races with a process that makes links
def test_removing_a_tree_follows_no_link_that_appears_meanwhile(tmp_path: Path) -> None:
    victim, tree = tmp_path / "victim", tmp_path / "tree"
    victim.mkdir(mode=0o711)
    (victim / "kept").write_text("kept")

    def work() -> None:
        tree.mkdir(exist_ok=True)
        (tree / "name").mkdir()
        (tree / "name" / "file").touch()
        (tmp_path / "link").symlink_to(victim)
        try:
            remove_tree(tree)
        finally:
            for left in (tree, tmp_path / "link"):
                shutil.rmtree(left, ignore_errors=True)
                left.unlink(missing_ok=True)

    def is_harmed() -> bool:
        return stat.S_IMODE(victim.stat().st_mode) != 0o711 or not (victim / "kept").exists()

    with swapping(tmp_path):
        attempt(work, until=is_harmed)
    assert not is_harmed()


@pytest.mark.slow  # races with a process that makes links
def test_freezing_a_tree_follows_no_link_that_appears_meanwhile(tmp_path: Path) -> None:
    victim, tree = tmp_path / "victim", tmp_path / "tree"
    victim.write_text("secret")
    victim.chmod(0o600)
    tree.mkdir()
    (tree / "name").write_text("of the tree")
    (tmp_path / "link").symlink_to(victim)

    def is_harmed() -> bool:
        return stat.S_IMODE(victim.stat().st_mode) != 0o600

    with swapping(tmp_path):
        attempt(lambda: freeze(tree), until=is_harmed)
    assert not is_harmed()


@pytest.fixture
def deep() -> Iterator[Path]:
    """A directory whose content may be deeper than Python's own functions remove."""
    folder = Path(tempfile.mkdtemp(prefix="pl-deep-"))
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_trees_of_any_depth_and_with_closed_directories_are_removed(deep: Path) -> None:
    tree = deep / "tree"
    tree.mkdir()
    here = os.open(tree, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    (tree / "closed" / "folder").mkdir(parents=True)
    (tree / "closed").chmod(0)
    (tree / "out").symlink_to(deep)
    remove_tree(tree)
    assert list(deep.iterdir()) == []


def test_tree_that_is_too_deep_to_be_walked_is_not_published(tmp_path: Path) -> None:
    (tmp_path / "/".join(["d"] * 120)).mkdir(parents=True)
    with pytest.raises(OSError, match="nested deeper"):
        freeze(tmp_path / "d")


@pytest.mark.slow  # makes many files
def test_a_directory_with_many_entries_costs_no_memory(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "many").mkdir(parents=True)
    (tree / "many" / "first").write_text("x")
    for n in range(10_000):
        os.link(tree / "many" / "first", tree / "many" / f"{n}-{'x' * 60}")
    for n in range(1000):
        (tree / f"folder-{n}").mkdir()
    tracemalloc.start()
    try:
        assert freeze(tree) == 11_002
        assert disk_bytes(tree) > 0
        assert tracemalloc.get_traced_memory()[1] < 200_000, "the names alone are 1 MB"
        remove_tree(tree)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
    assert not tree.exists()


def test_a_tree_has_as_many_entries_as_it_may(tmp_path: Path) -> None:
    (tmp_path / "tree/a/b").mkdir(parents=True)
    (tmp_path / "tree/a/link").symlink_to("b")
    assert freeze(tmp_path / "tree", max_entries=3) == 3
    with pytest.raises(TooManyEntries, match="tree/a"):
        freeze(tmp_path / "tree", max_entries=2)


@needs_root
@pytest.mark.root
def test_several_names_of_one_file_of_the_builds_are_no_foreign_files(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "one").write_text("x")
    (tree / "one").chmod(0o4755)
    (tree / "link").symlink_to("one")
    for path in (tree, tree / "one", tree / "link"):
        os.chown(path, TENANT_UID, TENANT_UID, follow_symlinks=False)
    os.link(tree / "one", tree / "two")
    os.link(tree / "link", tree / "link too", follow_symlinks=False)
    freeze(tree, owners=range(TENANT_UID, TENANT_UID + 1))
    assert {(p.lstat().st_uid, stat.S_IMODE(p.stat().st_mode)) for p in tree.iterdir()} == {
        (0, 0o555)
    }

    os.chown(tree / "one", TENANT_UID, TENANT_UID)
    (tmp_path / "roots").write_text("secret")
    os.link(tmp_path / "roots", tree / "linked in")
    os.link(tmp_path / "roots", tree / "twice")
    with pytest.raises(ValueError, match="belongs to uid 0, which did not create it"):
        freeze(tree, owners=range(TENANT_UID, TENANT_UID + 1))


# -- a build ---------------------------------------------------------------------------------------


@needs_root
@pytest.mark.root
@pytest.mark.slow
async def test_files_that_root_writes_for_a_build_are_not_the_builds_to_change(
    images: Images,
) -> None:
    output = Output()
    commands = [
        'echo "[global]" 2>/dev/null >> $PIP_CONFIG_FILE && echo changed',
        "mv $PIP_CONFIG_FILE $PIP_CONFIG_FILE.old 2>/dev/null && echo moved",
        '[ ! -e /etc/pip.conf ] || [ -z "$(cat /etc/pip.conf)" ] || echo changed',
        "touch $(dirname $PIP_CONFIG_FILE)/constraints.txt 2>/dev/null && echo made",
        # where root would follow them, if it wrote there
        (
            "ln -s /etc/pl-attack /tmp/constraints.txt; ln -s /etc /tmp/given; ln -s /etc/pl-attack "
            "image.json"
        ),
    ]
    await images.build(
        run_step(*(f"({command}) || true" for command in commands)), uid=TENANT_UID, part=output
    )
    assert not {"changed", "moved", "made"} & set(output.lines)
    assert not os.path.exists("/etc/pl-attack")


_REACH = """
import array, os, socket, sys
def attempt(name, action):
    try:
        action()
        print("reached", name)
    except OSError as e:
        print("refused", name, type(e).__name__)
fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [os.open(".", os.O_RDONLY)]))]
for kind, name in ((socket.SOCK_STREAM, "stream"), (socket.SOCK_DGRAM, "datagram")):
    for address in ("\\0" + sys.argv[1] + name, sys.argv[2] + "/" + name):
        attempt(f"{name} {'abstract' if address[0] == chr(0) else 'path'}", lambda: socket.socket(socket.AF_UNIX, kind).connect(address))
target = "\\0" + sys.argv[1] + "datagram"
attempt("datagram pair", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendmsg([b"x"], fds, 0, target))
attempt("raw pair", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW)[0].sendmsg([b"x"], fds, 0, target))
attempt("listener", lambda: socket.socket(socket.AF_UNIX).bind("\\0" + sys.argv[1] + "inside"))
attempt("loopback", lambda: socket.create_connection(("127.0.0.1", int(sys.argv[3])), timeout=3))
attempt("host", lambda: socket.create_connection((sys.argv[4], int(sys.argv[3])), timeout=3))
pair = socket.socketpair()
pair[0].send(b"x")
print("pairs", pair[1].recv(1), "namespace", os.stat("/proc/self/ns/net").st_ino)
"""


@needs_root
@pytest.mark.root
@pytest.mark.slow
async def test_a_build_hands_no_descriptor_to_a_process_outside_and_reaches_no_server_of_the_host(
    bare_images: Images, index: Path
) -> None:
    name, output = f"pl-{os.getpid()}-", Output()
    (index / "reach.py").write_text(_REACH)
    with contextlib.ExitStack() as stack:
        for kind, word in ((socket.SOCK_STREAM, "stream"), (socket.SOCK_DGRAM, "datagram")):
            for address in (f"\0{name}{word}", str(index / word)):
                server = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
                server.bind(address)
                if kind == socket.SOCK_STREAM:
                    server.listen()
            (index / word).chmod(0o777)
        port = stack.enter_context(socket.create_server(("0.0.0.0", 0))).getsockname()[1]
        command = f"python {index}/reach.py {name} {index} {port} {host_address()}"
        await bare_images.build(run_step(command), uid=TENANT_UID, part=output)
    assert not [line for line in output.lines if line.startswith("reached")]
    assert len([line for line in output.lines if line.startswith("refused")]) == 9
    [said] = [line for line in output.lines if line.startswith("pairs")]
    assert said.startswith("pairs b'x' namespace ")
    assert int(said.split()[-1]) != os.stat("/proc/self/ns/net").st_ino


_STAY = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
if os.getpid() != os.getsid(0):
    os.setsid()
for stays in (True, False):
    if os.fork() == 0:
        os.setsid()
        for fd in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        time.sleep(600)
if sys.argv[1] == "stay":
    print("staying", flush=True)
    time.sleep(600)
"""


def processes_with(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and mark.encode() in (
                command := (folder / "cmdline").read_bytes()
            ):
                found.append(command.decode())
    return found


@needs_root
@pytest.mark.root
@pytest.mark.slow
async def test_no_process_of_a_build_outlives_its_step_or_its_caller(
    bare_images: Images, index: Path
) -> None:
    (index / "stay.py").write_text(_STAY)
    first, second = f"exec python {index}/stay.py leave", f"exec python {index}/stay.py stay"
    output = Output("staying")
    between: list[str] = []

    async def watch(body: Mapping[str, Any]) -> None:
        await output(body)
        if body.get("text", "") == f"$ {second}":
            between.extend(processes_with(f"{index}/stay.py"))

    build = asyncio.create_task(
        bare_images.build(run_step(first, second), uid=TENANT_UID, part=watch)
    )
    await asyncio.wait(
        [build, asyncio.create_task(output.seen.wait())], return_when=asyncio.FIRST_COMPLETED
    )
    assert output.seen.is_set(), output.lines
    assert between == []
    build.cancel()
    await asyncio.wait([build])
    try:
        assert processes_with(f"{index}/stay.py") == []
    finally:
        _kill_with(f"{index}/stay.py")


def _kill_with(mark: str) -> None:
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and mark.encode() in (folder / "cmdline").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


# -- what tenants share ----------------------------------------------------------------------------


def test_an_image_that_another_tenant_built_of_the_same_description_is_not_used(
    tmp_path: Path,
) -> None:
    root, digest = tmp_path / "node" / "images", "a" * 64
    bare_images = Images(tmp_path, environ={}, requirements=[])
    for key in (f"{digest}-20001", f"{digest}-20002"):
        (root / key / "files").mkdir(parents=True)
        (root / key / "image.json").write_text(
            json.dumps({"python": sys.executable, "prefix": "/", "site": ["files"], "env": {}})
        )
    assert bare_images.layout(digest, uid=20001).site == (root / f"{digest}-20001" / "files",)
    assert bare_images.layout(digest, uid=20002).site == (root / f"{digest}-20002" / "files",)
    for uid in (20003, None):
        with pytest.raises(BundleUnavailable, match="is not on this node"):
            bare_images.layout(digest, uid=uid)
    assert bare_images.prune({digest}) == []
    assert bare_images.prune(set()) == [digest]
    assert list(root.iterdir()) == []


@needs_root
@pytest.mark.root
@pytest.mark.slow
async def test_tenants_build_the_same_description_each_for_itself(bare_images: Images) -> None:
    description = run_step("id -u > files.txt")
    digests = [
        await bare_images.build(description, uid=uid, part=Output())
        for uid in (TENANT_UID, TENANT_UID + 1)
    ]
    assert digests[0] == digests[1]
    for uid in (TENANT_UID, TENANT_UID + 1):
        assert (
            bare_images.layout(digests[0], uid=uid).site[1] / "files.txt"
        ).read_text() == f"{uid}\n"


# -- what slots bind -------------------------------------------------------------------------------


@pytest.mark.slow
async def test_an_image_whose_packages_are_behind_a_link_is_not_built(
    bare_images: Images, tmp_path: Path
) -> None:
    site = f"$VIRTUAL_ENV/lib/python{VERSION}/site-packages"
    command = (
        f"cp -R {site} $VIRTUAL_ENV/elsewhere && rm -rf {site} && ln -s "
        f"$VIRTUAL_ENV/elsewhere {site}"
    )
    with pytest.raises(ImageBuildFailed, match=r"site-packages.*leads through a symbolic link"):
        await bare_images.build(run_step(command), uid=None, part=Output())
    assert not [path for path in (tmp_path / "node" / "images").iterdir() if path.suffix != ".log"]


@pytest.mark.parametrize("site", ["packages", "packages/ssl", "../../../..", "/etc"])
def test_an_image_whose_packages_lie_elsewhere_is_bound_into_no_slot(
    tmp_path: Path, site: str
) -> None:
    image = tmp_path / "node" / "images" / ("a" * 64)
    (image / "files").mkdir(parents=True)
    (image / "packages").symlink_to("/etc")
    body = {"python": sys.executable, "prefix": sys.prefix, "env": {}, "site": ["files", site]}
    (image / "image.json").write_text(json.dumps(body))
    with pytest.raises(Unsupported, match=r"leads (through a symbolic link|out of it)"):
        Images(tmp_path, environ={}, requirements=[]).layout("a" * 64)


@needs_root
@pytest.mark.root
@pytest.mark.parametrize(
    "name, said",
    [
        ("env/0", "is a symbolic link"),
        ("code", "is a symbolic link"),
        ("weights/../../../etc", "outside the slot"),
        ("/etc", "outside the slot"),
    ],
)
def test_a_slot_binds_nothing_through_a_link_and_to_no_place_outside_its_tree(
    tmp_path: Path, name: str, said: str
) -> None:
    source = tmp_path
    if said == "is a symbolic link":
        source = tmp_path / "link"
        source.symlink_to("/etc")
    program = "import sys; from snapshotter.shim.sandbox import mounts; at = mounts.prepare(sys.argv[3])\n"
    program += "mounts.build(at, [(sys.argv[1], sys.argv[2])], uid=0, writable_bytes=1 << 20)"
    command = [
        "unshare",
        "--mount",
        sys.executable,
        "-c",
        program,
        str(source),
        name,
        str(tmp_path),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 1
    assert said in done.stderr


# -- its network -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, there",
    [
        ("http://localhost:3141/root/simple", True),
        ("https://user:word@127.0.0.1/simple", True),
        ("[global]\nindex-url = http://[::1]:8080/\n", True),
        ("127.0.0.1:3128", True),
        ("http://a.example/ http://LOCALHOST/", True),
        ("https://packages.example/localhost/simple", False),
        ("http://localhost.example/simple", False),
        ("http://10.127.0.0.1.example", False),
        ("/var/wheels", False),
    ],
)
def test_an_index_on_loopback_is_known_by_its_address(text: str, there: bool) -> None:
    assert is_on_loopback(["/nothing", text]) is there


async def test_a_build_shares_the_hosts_network_where_its_index_is_on_loopback_and_says_why() -> (
    None
):
    async with joined(BuildNetworkPolicy(), ["http://127.0.0.1:3141/simple"]) as network:
        assert network.namespace is None
        assert "loopback" in network.remark
    async with joined(BuildNetworkPolicy(kind=BuildNetwork.HOST), []) as network:
        assert network.namespace is None
        assert "build_network" in network.remark


@pytest.mark.root
async def test_a_network_that_cannot_be_made_for_a_moment_does_not_open_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "unshare"
    broken.write_text("#!/bin/sh\necho no memory >&2\nexit 1\n")
    broken.chmod(0o755)
    async with net_commands.fresh_namespace() as namespace:
        name = await slot_network.connect(namespace)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(Unsupported, match="no memory"):
            async with joined(BuildNetworkPolicy(), []):
                pass
        await slot_network.remove([name])
    await slot_network.sweep()

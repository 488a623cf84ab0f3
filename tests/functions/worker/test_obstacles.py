"""What a snapshot can take passes, what it cannot is named: one test for each thing that was tried
with CRIU (docs/how-to/snapshots.md)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import multiprocessing.shared_memory
import os
import select
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pilotlight.worker.snapshot import snapshot_blockers
from pilotlight.worker.snapshot.processes import descendants, process_name
from pilotlight.worker.snapshot.snapshot_blockers import GHOST_BYTES, BlockerScan, ScanFindings
from pilotlight.worker.user_code.source_locations import SocketOrigins, UserSource
from tests.fakes.fake_shim import function_spec
from tests.fakes.freezing_shim import FreezingShim

HERE = Path(__file__).parent


Look = Callable[..., ScanFindings]


@pytest.fixture
def look(tmp_path: Path) -> Iterator[Look]:
    """Look at this process, and leave aside what the test run itself has open, and runs; this file
    is the user's code."""
    writable = tmp_path / "work"
    writable.mkdir()
    places = SocketOrigins(UserSource(str(HERE), by_value=False))
    places.watch()
    scene = BlockerScan(writable=(str(writable),), places=places)
    # not the listing's own
    before = {
        fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.lexists(f"/proc/self/fd/{fd}")
    }
    strangers = descendants(os.getpid())  # servers that other tests' fixtures run
    already = scene.scan(leave_aside=before)

    def look_now(*, pairs: bool = True) -> ScanFindings:
        theirs = {
            f" of process {process_name(pid)}"
            for stranger in strangers
            for pid in (stranger, *descendants(stranger))
        }
        found = scene.scan(leave_aside=before, pairs=pairs)
        found.obstacles = [
            one for one in found.obstacles if not any(owner in one.message for owner in theirs)
        ]
        found.listens = [one for one in found.listens if one not in already.listens]
        found.connections_inside -= already.connections_inside if pairs else 0
        return found

    yield look_now
    places.unwatch()


def test_a_connection_whose_other_end_is_elsewhere(look: Look) -> None:
    with outside_server() as port, socket.socket() as client:
        client.connect(("127.0.0.1", port))
        (one,) = look().obstacles
        assert (one.kind, one.fd, one.what) == (
            "connection",
            client.fileno(),
            f"TCP to 127.0.0.1:{port}",
        )
        assert one.where is not None
        assert one.where.startswith("test_obstacles.py:")
        wanted = (
            f"enter() left a connection open: descriptor {one.fd}, {one.what} ({one.where}). "
            f"Close it, or open it in @enter(snap=False)"
        )
        assert one.message == wanted


@contextlib.contextmanager
def outside_server(family: int = socket.AF_INET, path: str = "") -> Iterator[int]:
    """A server in a process that is nobody's child: forked twice. Ends with the test."""
    keep, let_go = os.pipe()
    listener = socket.socket(family)
    with listener:
        listener.bind(path or ("127.0.0.1", 0))
        listener.listen(8)
        port = 0 if path else int(listener.getsockname()[1])
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                os.close(let_go)
                os.read(keep, 1)
            os._exit(0)
        os.waitpid(middle, 0)
    os.close(keep)
    yield port
    os.close(let_go)


def test_a_unix_connection_to_elsewhere(look: Look, short_tmp: Path) -> None:
    path = str(short_tmp / "s")
    with outside_server(socket.AF_UNIX, path), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        (one,) = look().obstacles
        assert (one.kind, one.what) == ("connection", f"Unix to {path}")


def test_a_udp_socket_that_is_connected_or_bound(look: Look) -> None:
    with (
        socket.socket(type=socket.SOCK_DGRAM) as connected,
        socket.socket(type=socket.SOCK_DGRAM) as bound,
    ):
        connected.connect(("127.0.0.1", 9))
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert {(o.kind, o.what) for o in look().obstacles} == {
            ("connection", "UDP to 127.0.0.1:9"),
            ("socket", f"UDP on {address}"),
        }


def test_an_ipv6_connection(look: Look) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as client:
        try:
            client.connect(("::1", 9))
        except OSError:
            pytest.skip("no IPv6 here")
        assert [o.what for o in look().obstacles] == ["UDP to [::1]:9"]


def test_sockets_without_a_peer_pass(look: Look) -> None:
    with (
        socket.socket(),
        socket.socket(type=socket.SOCK_DGRAM),
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_INET6),
    ):
        assert look() == ScanFindings()


def test_a_socket_of_another_family_is_named(look: Look) -> None:
    try:
        other = socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)
    except OSError:
        pytest.skip("no AF_ALG here")
    with other:
        assert [(o.kind, o.what) for o in look().obstacles] == [("socket", "AF_ALG socket")]


def test_a_listener_is_no_obstacle_and_is_named(look: Look) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert look() == ScanFindings(listens=[f"127.0.0.1:{server.getsockname()[1]}"])


def test_connections_with_both_ends_inside_pass(look: Look) -> None:
    one, other = socket.socketpair()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        one,
        other,
    ):
        accepted, _ = server.accept()
        with accepted, client:
            found = look()
            assert (found.obstacles, found.connections_inside) == ([], 2)


def test_a_socketpair_with_a_child_passes(look: Look) -> None:
    ours, theirs = socket.socketpair()
    with ours, subprocess.Popen(["/bin/cat"], stdin=theirs.fileno()) as child:
        theirs.close()
        assert look().obstacles == []
        ours.shutdown(socket.SHUT_WR)
        assert child.wait(30) == 0


def test_a_child_process_connection_is_found_in_it(look: Look) -> None:
    with (
        outside_server() as port,
        socket.create_connection(("127.0.0.1", port)) as client,
        subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, pass_fds=[client.fileno()]) as child,
    ):
        assert child.stdin is not None
        client.close()
        (one,) = look().obstacles
        assert one.what == f"TCP to 127.0.0.1:{port}"
        assert f"of process cat ({child.pid})" in one.message
        child.stdin.close()


def test_what_snapshots_can_take_passes(look: Look, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(select.epoll())
        for descriptor in (
            os.eventfd(0),
            os.memfd_create("m"),
            os.pidfd_open(os.getpid()),
            inotify(),
            *os.pipe(),
        ):
            stack.callback(os.close, descriptor)
        stack.enter_context(mmap.mmap(-1, 1 << 16))
        stack.enter_context(tempfile.TemporaryFile(dir=tmp_path / "work"))
        stack.enter_context((tmp_path / "work" / "own").open("w"))
        stack.enter_context(Path("/dev/null").open("r+b", buffering=0))
        stack.enter_context(Path("/dev/urandom").open("rb", buffering=0))
        stack.enter_context(Path(__file__).open())
        memory = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
        stack.callback(memory.unlink)
        stack.callback(memory.close)
        lock = multiprocessing.Lock()
        event = threading.Event()
        thread = threading.Thread(target=event.wait)
        thread.start()
        stack.callback(thread.join)
        stack.callback(event.set)
        assert look() == ScanFindings()
        del lock


def inotify() -> int:
    return int(ctypes.CDLL(None).inotify_init1(os.O_CLOEXEC))


def test_a_file_open_for_writing_outside_the_writable_tree(look: Look, tmp_path: Path) -> None:
    with (tmp_path / "log").open("a") as log:
        (one,) = look().obstacles
        assert (one.kind, one.fd, one.what) == (
            "file",
            log.fileno(),
            f"{tmp_path}/log, open for writing",
        )
        assert f"which contains only {tmp_path}/work" in one.message


def test_a_deleted_file_only_when_it_is_too_large(look: Look, tmp_path: Path) -> None:
    with tempfile.TemporaryFile(dir=tmp_path / "work") as file:
        file.truncate(GHOST_BYTES)
        assert look().obstacles == []
        file.truncate(GHOST_BYTES + (1 << 20))
        (one,) = look().obstacles
        assert one.kind == "file"
        assert one.what.startswith("deleted file of 65 MiB, ")


def test_a_device(look: Look) -> None:
    try:
        terminal = os.open("/dev/ptmx", os.O_RDWR)
    except OSError:
        pytest.skip("no terminals here")
    try:
        (one,) = look().obstacles
        assert (one.kind, one.fd) == ("device", terminal)
        assert one.message.startswith(f"enter() left a device open: descriptor {terminal}, /dev/")
    finally:
        os.close(terminal)


@pytest.mark.parametrize(
    "path, is_one",
    [
        ("/dev/nvidia0", False),
        ("/dev/nvidia-uvm", False),
        ("/dev/fuse", True),
        ("/dev/null", False),
    ],
)
def test_devices_of_a_gpu_are_left_to_the_agent(
    look: Look, monkeypatch: pytest.MonkeyPatch, path: str, is_one: bool
) -> None:
    monkeypatch.setattr(snapshot_blockers, "open_links", lambda _pid, _leave: [(77, path)])
    assert [(one.kind, one.fd) for one in look().obstacles] == ([("device", 77)] if is_one else [])


def test_an_io_uring_by_descriptor_and_by_mapping(look: Look) -> None:
    parameters = ctypes.create_string_buffer(120)
    ring = ctypes.CDLL(None).syscall(425, 4, parameters)
    if ring < 0:
        pytest.skip("no io_uring here")
    assert [(o.kind, o.fd, o.what) for o in look().obstacles] == [("io_uring", ring, "io_uring")]
    mapped = mmap.mmap(ring, 4096, flags=mmap.MAP_SHARED)  # keeps a descriptor of its own
    os.close(ring)
    assert [(o.kind, o.what) for o in look().obstacles] == [
        ("io_uring", "io_uring"),
        ("io_uring", "io_uring, mapped"),
    ]
    mapped.close()
    assert look().obstacles == []


def test_watching_sockets_leaves_no_trace() -> None:
    init = socket.socket.__init__
    places = SocketOrigins(UserSource("/", by_value=False))
    places.watch()
    assert socket.socket.__init__ is not init
    places.unwatch()
    assert socket.socket.__init__ is init
    assert "connect" not in vars(socket.socket)


def test_a_number_that_a_library_uses_again_is_not_the_users_any_more(tmp_path: Path) -> None:
    places = SocketOrigins(UserSource(str(tmp_path), by_value=False))
    places.watch()
    try:
        make = eval(
            compile("lambda: socket()", str(tmp_path / "app.py"), "eval"), {"socket": socket.socket}
        )
        with make() as one:
            number = one.fileno()
            assert places.get(number) == "app.py:1"
        with socket.socket() as other:
            assert other.fileno() == number
            assert number not in places
    finally:
        places.unwatch()


def test_the_worker_names_listeners_and_obstacles_of_its_tree() -> None:
    code = """
        import socket
        server = socket.create_server(("127.0.0.1", 0))
        log = open("../outside.log", "w")
        inside = open("inside.log", "w")
        def f(): return server.getsockname()[1]
    """
    with FreezingShim({"app.py": code}, function_spec()) as shim:
        point = shim.wait_event("snapshot_point")
        assert len(point["listens"]) == 1
        assert [o["what"] for o in point["obstacles"]] == [
            f"{shim.root}/outside.log, open for writing"
        ] or tempfile.gettempdir() in str(shim.root)


def test_a_connection_to_itself_is_in_the_way_of_a_fork(look: Look) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
    ):
        accepted, _ = server.accept()
        with accepted:
            assert [o.kind for o in look(pairs=False).obstacles] == ["connection"] * 2


def test_a_socket_class_that_user_code_replaced_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other(socket.socket):
        pass

    places = SocketOrigins(UserSource("/", by_value=False))
    places.watch()
    monkeypatch.setattr(socket, "socket", Other)  # as gevent does
    places.unwatch()
    assert not {"__init__", "connect"} & vars(Other).keys()
    assert "connect" not in vars(Other.__mro__[1])


def test_a_file_of_a_volume_that_is_open_or_mapped_is_an_obstacle(tmp_path: Path) -> None:
    volume = tmp_path / "data"
    volume.mkdir()
    (volume / "open").write_bytes(b"x")
    (volume / "mapped").write_bytes(b"x" * 4096)
    places = SocketOrigins(UserSource(str(HERE), by_value=False))
    scene = BlockerScan(writable=(str(tmp_path),), places=places, volumes=(str(volume),))
    with (volume / "mapped").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
    with (volume / "open").open("rb"):
        found = {o.what for o in scene.scan().obstacles if str(volume) in o.what}
    mapping.close()
    opened = {f"{volume}/{name}, of a volume" for name in ("open", "mapped")}  # mmap keeps one
    assert found == opened | {f"{volume}/mapped, of a volume, mapped"}
    assert not [o for o in scene.scan().obstacles if str(volume) in o.what]

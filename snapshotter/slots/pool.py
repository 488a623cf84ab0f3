"""Creates slots: the spawner process, one spare slot of each kind, and the recovery of slots of an
earlier agent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from pilotlight.core.rpc import grant_group_access
from pilotlight.core.threads import cancel_and_wait
from pilotlight.core.transport.calls_socket import CALLS_DIRECTORY
from snapshotter.errors import Unsupported
from snapshotter.linux import host_network, proc, slot_network
from snapshotter.linux.dns_servers import NetworkAccess
from snapshotter.linux.nft_watch import NftWatch
from snapshotter.linux.slot_network import Network
from snapshotter.shim import seqpacket
from snapshotter.slots import sockets
from snapshotter.slots.replies import SlotConnectionLost
from snapshotter.slots.slot import Slot

_log = logging.getLogger(__name__)
_ANSWER_PATIENCE_S = 10.0
_NETWORK = "network"
_SPARE_AFTER_S = 0.2
"""How long after a slot was acquired the next spare one is made: making it takes the processors
that the start in the acquired slot needs. A start that finds none has it made at once."""
_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); from snapshotter.shim.spawner import main; "
    "main({fd})"
)


class SlotPool:
    """Creates slots. Owner: the event loop. One request to the spawner at a time (`_turn`), because
    answers arrive in order.

    Attributes:
        namespaced: whether slots get their own namespaces (root with CAP_SYS_ADMIN).
        why_not: the reason if they do not, otherwise None.
    """

    def __init__(
        self,
        directory: Path,
        logs: Path,
        *,
        log_max_bytes: int,
        namespaced: bool,
        groups: Collection[Path] = (),
        disk_floor_bytes: int = 0,
        usual: Network = Network.HOST,
        access: NetworkAccess | None = None,
    ) -> None:
        """`groups`: cgroup directories (`Cgroups.bases`) that slots hold open, because they are not
        visible from a slot's root. `usual`: kind of the first slot. `access`: of slots with
        their own network; None = everything."""
        access = access or NetworkAccess()
        self._egress, self._servers, self._usual = access.egress, access.name_servers, usual
        self._directory = directory
        self._logs = logs
        self._log_max_bytes = log_max_bytes
        self._disk_floor_bytes = disk_floor_bytes
        self._groups = sorted(map(str, groups))
        self.namespaced = namespaced
        self.why_not: str | None = None if namespaced else "the agent is not root"
        self._spawner: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._turn = asyncio.Lock()
        self._spares: dict[Network, list[asyncio.Task[Slot]]] = {kind: [] for kind in Network}
        self._needed: dict[Network, asyncio.Event] = {kind: asyncio.Event() for kind in Network}
        self._networks: dict[str, tuple[str, ...]] = {}
        self._watch: NftWatch | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._is_removed = False
        self._is_closed = False

    def __repr__(self) -> str:
        pid = self._spawner.pid if self._spawner else 0
        kinds = ", ".join(kind for kind, spares in self._spares.items() if spares)
        return (
            f"<SlotPool spawner pid {pid}, namespaces {'on' if self.namespaced else 'off'}, "
            f"spare: {kinds}>"
        )

    async def open(self) -> None:
        """Start the spawner and make the first slot; falls back to slots without namespaces if the
        machine does not allow them."""
        if self.namespaced:
            await slot_network.sweep()
            if self._networks:
                self._watch_rules()
            await self._reapply_networks()
        try:
            spare = await self._make_first()
        except Unsupported as e:
            if not self.namespaced:
                raise
            _log.warning("namespaces.off reason=%s", e)
            self.namespaced, self.why_not, self._usual = False, str(e), Network.HOST
            spare = await self._make(Network.HOST)
        self._spares[self._usual].append(asyncio.create_task(_completed(spare), name="spare slot"))

    async def _reapply_networks(self) -> None:
        """Apply the current settings to the networks of adopted slots, including requested egress
        that is still allowed."""
        for name in list(self._networks):  # slots may be added or removed during the loop
            requested = self._networks.get(name, ())
            try:
                await slot_network.keep([name], self._egress.requested(requested), self._servers)
            except (Unsupported, ValueError, OSError) as e:
                # it keeps its previous rules or the default ones
                _log.warning("network.not_kept interface=%s reason=%s", name, e)
                with contextlib.suppress(Unsupported, OSError):
                    await slot_network.keep([name], self._egress, self._servers)

    def _watch_rules(self) -> None:
        if self._watch is None:
            try:
                self._watch = NftWatch(host_network.TABLE, self._rules_removed)
            except OSError as e:
                _log.warning(
                    "cannot watch the rules of slots' networks: if another program removes them, "
                    "they are restored with the next slot only reason=%s",
                    e,
                )

    def _rules_removed(self) -> None:
        host_network.forget()
        # otherwise the removal of the last slot deleted them
        self._is_removed = not self._networks.keys().isdisjoint(host_network.interfaces())
        if self._is_removed and (self._restoring is None or self._restoring.done()):
            self._restoring = asyncio.create_task(self._restore_rules(), name="rules of networks")

    async def _restore_rules(self) -> None:
        while self._is_removed:
            self._is_removed = False  # they may be removed again during the restore
            _log.warning(
                "another program removed the rules of slots' networks: restoring them table=%s",
                host_network.TABLE,
            )
            await self._reapply_networks()

    async def open_egress(self, slot: Slot, requested: Collection[str]) -> None:
        """Allow these networks in addition, for a slot with its own network, before it has a
        worker. Raises Unsupported."""
        record = slot.directory / _NETWORK
        try:
            name = record.read_text().split()[0]
            egress = self._egress.requested(requested)
        except FileNotFoundError as e:
            raise Unsupported(
                "egress= requires function networks (snapshotter.function_network: own), which "
                "this machine does not support"
            ) from e
        except ValueError as e:
            raise Unsupported(str(e)) from e
        record.write_text("\n".join([name, *requested]))
        self._networks[name] = tuple(requested)
        await slot_network.keep([name], egress, self._servers)

    async def _make_first(self) -> Slot:
        """Make a slot and verify that its process starts: it mounts file systems, which not every
        container allows. Raises Unsupported."""
        slot = await self._make(self._usual)
        try:
            await slot.adopt()
        except SlotConnectionLost as e:
            error = _last_line(slot.directory / "shim.err")
            await slot.end()
            raise Unsupported(f"the process of a slot does not start: {error or e}") from e
        return slot

    async def acquire(self, slot_network: Network | bool = Network.HOST) -> Slot:
        """An unused slot in that network (True: its own); the next of its kind is made in the
        background, after a pause.

        Raises Unsupported.
        """
        kind = Network.of(slot_network)
        spares, slot = self._spares[kind], None
        self._needed[kind].set()
        if spares:
            with contextlib.suppress(Unsupported):
                slot = await self._wait(kind, spares.pop(0))
        if slot is None or slot.is_lost:
            slot = await self._wait(
                kind, asyncio.create_task(self._make(kind), name=f"slot, network {kind}")
            )
        if not spares and not self._is_closed:
            self._needed[kind] = asyncio.Event()
            spare = self._make_spare(kind, self._needed[kind])
            spares.append(asyncio.create_task(spare, name=f"spare slot, network {kind}"))
            spares[0].add_done_callback(sockets.seen)
        return slot

    async def _make_spare(self, kind: Network, needed: asyncio.Event) -> Slot:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SPARE_AFTER_S):
                await needed.wait()
        return await self._make(kind)

    async def _wait(self, kind: Network, making: asyncio.Task[Slot]) -> Slot:
        """Wait for a slot in the making. If the caller is cancelled, the slot becomes a spare."""
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            if not making.cancelled():
                making.add_done_callback(sockets.seen)
                self._spares[kind].append(making)
                if self._is_closed:
                    await self._end_spares()
            raise

    async def aclose(self) -> None:
        """End the spare slots and the spawner, and undo the changes of slots' networks on the
        host."""
        self._is_closed = True
        for needed in self._needed.values():
            needed.set()
        await self._end_spares()
        async with self._turn:  # a request in progress is answered, and its slot ended
            if self._control is not None:
                self._control.close()
            if self._spawner is not None:
                await asyncio.to_thread(self._spawner.wait)
        if self._watch is not None:
            self._watch.close()
        if self._restoring is not None:
            await cancel_and_wait(self._restoring)
        if self._networks:
            await slot_network.remove(self._networks)
            await slot_network.sweep()

    async def _end_spares(self) -> None:
        spares = [spare for each in self._spares.values() for spare in each]
        self._spares = {kind: [] for kind in Network}
        for spare in spares:
            with contextlib.suppress(Unsupported):
                await (await spare).end()

    async def adopt(self) -> list[Slot]:
        """Recover the slots of an earlier agent: live slots are connected and mirrored, dead ones
        are removed."""
        found = []
        for directory in sorted(self._directory.iterdir()) if self._directory.exists() else []:
            try:
                connection = sockets.connect(directory / "shim.sock")
            except OSError:
                shutil.rmtree(directory, ignore_errors=True)
                continue
            slot = Slot(directory.name, directory, connection, -1)
            for path in (directory, *directory.glob("i-*.sock")):
                grant_group_access(path)
            if (directory / CALLS_DIRECTORY).is_dir():
                sockets.make_calls_directory(directory, is_shown=self.namespaced)
            try:
                await slot.adopt()
            except SlotConnectionLost:
                await slot.end()
                continue
            with contextlib.suppress(FileNotFoundError):
                name, *requested = (directory / _NETWORK).read_text().split()
                self._networks[name] = tuple(requested)
            found.append(slot)
        return found

    async def _make(self, kind: Network) -> Slot:
        if kind is not Network.HOST and not self.namespaced:
            raise Unsupported(f"a worker with its own network needs namespaces: {self.why_not}")
        slot_id = f"s-{secrets.token_hex(8)}"
        directory = self._directory / slot_id
        directory.mkdir(parents=True, mode=0o700)
        grant_group_access(directory)
        try:
            return await self._spawn(slot_id, directory, kind)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    async def _connect(self, shim: int, directory: Path) -> None:
        """Connect the network of this shim's slot; records the interface for `aclose`, which then
        need not wait for the kernel."""
        try:
            namespace = os.open(f"/proc/{proc.host_pid(shim)}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                name = await slot_network.connect(namespace, self._egress, self._servers)
            finally:
                os.close(namespace)
            (directory / _NETWORK).write_text(name)
        except OSError as e:
            raise Unsupported(f"cannot connect a slot's network: {e}") from e
        self._watch_rules()
        living = set(host_network.interfaces())
        self._networks = {
            **{known: requested for known, requested in self._networks.items() if known in living},
            name: (),
        }

    async def _spawn(self, slot_id: str, directory: Path, kind: Network) -> Slot:
        order = {
            "slot": slot_id,
            "directory": str(directory),
            "logs": str(self._logs),
            "log_max_bytes": self._log_max_bytes,
            "disk_floor_bytes": self._disk_floor_bytes,
            "groups": self._groups,
            "namespaces": self.namespaced,
            "network": kind is not Network.HOST,
            "name_servers": self._servers.find().text if kind is Network.OWN else None,
        }
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with listener:
            listener.bind(str(directory / "shim.sock"))
            listener.listen(8)
            async with self._turn:
                if self._is_closed:
                    raise Unsupported("cannot make a slot: the node agent is ending")
                answer, fds = await self._request(order, listener.fileno())
        if not fds:
            raise Unsupported(
                f"cannot make a slot: {answer.get('error', 'the spawner has exited')}"
            )
        try:
            if kind is Network.OWN:
                await self._connect(fds[0], directory)
            return Slot(slot_id, directory, sockets.connect(directory / "shim.sock"), fds[0])
        except BaseException:
            _kill(fds)
            raise

    async def _request(
        self, order: dict[str, object], listener: int
    ) -> tuple[dict[str, object], list[int]]:
        """Wait for the spawner's answer. If the caller is cancelled, the shim is killed once it is
        there: nothing else knows of it."""
        request = asyncio.ensure_future(asyncio.to_thread(self._request_slot, order, listener))
        try:
            return await asyncio.shield(request)
        except asyncio.CancelledError:
            with contextlib.suppress(asyncio.CancelledError):
                _kill((await request)[1])
            raise

    def _request_slot(
        self, order: dict[str, object], listener: int
    ) -> tuple[dict[str, object], list[int]]:
        for _ in range(2):  # a spawner that has exited is replaced once
            control = self._ensure()
            try:
                seqpacket.send(control, seqpacket.encode(order), [listener])
                answer, fds = seqpacket.receive(control)
            except OSError:
                answer, fds = None, []
            if answer is not None:
                return answer, fds
            self._discard()
        return {}, []

    def _ensure(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            root = str(Path(__file__).resolve().parents[2])
            argv = [sys.executable, "-I", "-S", "-c", _BOOT.format(root=root, fd=theirs.fileno())]
            self._spawner = subprocess.Popen(
                argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={"PATH": os.defpath}
            )
        ours.settimeout(_ANSWER_PATIENCE_S)
        self._control = ours
        return ours

    def _discard(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._spawner is not None:
            self._spawner.kill()
            self._spawner.wait()
            self._spawner = None


def _kill(shim: Sequence[int]) -> None:
    """Kill the shim of an answer, and close its pidfd."""
    for pidfd in shim:
        proc.send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def _last_line(file: Path) -> str:
    with contextlib.suppress(OSError, IndexError):
        return file.read_text(errors="replace").strip().splitlines()[-1]
    return ""


async def _completed(slot: Slot) -> Slot:
    return slot

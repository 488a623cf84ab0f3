"""Boots workers in pods, in an environment of the node which the pod's own image does not have: by
the agent, in the root file system of the function's image; or by the pod's launcher, in a tree that
the agent has built."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pilotlight.core.transport.calls_socket import CALLS_VARIABLE, POD_CALLS_SOCKET
from snapshotter.criu.errors import CriuError
from snapshotter.errors import Unsupported
from snapshotter.linux import proc
from snapshotter.pods.entered_worker import (
    Returned,
    apply_pod_settings,
    keep_if_passed_on,
    stdio_of,
)
from snapshotter.pods.entry.pod_entry import entered
from snapshotter.pods.entry.processes import EntryProcesses
from snapshotter.pods.environments import PodEnvironments
from snapshotter.pods.pod_process import pidfd_of_peer, require_own_namespaces
from snapshotter.types import (
    VISIBLE_DEVICES,
    LaunchSpec,
)


class PodBoots:
    """Boots workers in pods. Owner: the event loop."""

    def __init__(self, environments: PodEnvironments, processes: EntryProcesses) -> None:
        self._environments = environments
        self._processes = processes

    def __repr__(self) -> str:
        return f"<PodBoots {self._environments!r}>"

    @contextlib.asynccontextmanager
    async def booted(
        self,
        spec: LaunchSpec,
        peer: socket.socket,
        *,
        code: Path,
        weights: Mapping[str, Path],
        gpus: Sequence[str] = (),
    ) -> AsyncIterator[Returned]:
        """Boot a worker in the root file system of its function's container image, which nothing in
        the pod could enter; it is killed at the end of the context unless it is kept. Raises
        BundleUnavailable, Unsupported, OSError."""
        sources = self._environments.sources(spec, code, weights)
        if sources.layout.rootfs is None:
            raise Unsupported(f"the environment of {spec.revision} has no root file system")
        began = time.perf_counter()
        try:
            async with contextlib.AsyncExitStack() as held:
                pidfd = pidfd_of_peer(peer)
                held.callback(os.close, pidfd)
                pod = require_own_namespaces(pidfd)
                plan, _ = held.enter_context(self._environments.planned(spec, sources))
                stdio = held.enter_context(stdio_of(pod))
                brought = self._environments.brought(spec, sources, plan, stdio=stdio)
                kit = self._environments.stock().kit
                entry = await held.enter_async_context(
                    entered(self._processes, pidfd, brought, kit)
                )
                names = ("argv", "work", "uid", "limits")
                command = {name: plan.order[name] for name in names}
                env = self._booted_env(spec, plan.order["env"], gpus)
                worker = await entry.boot({**command, "env": env})
                held.callback(worker.close)
                assert worker.socket is not None
                held.callback(worker.socket.close)
                host_pid = proc.host_pid(worker.pidfd)
                await asyncio.to_thread(apply_pod_settings, host_pid, pod)
                found = Returned(
                    pid=worker.pid,
                    control=worker.socket,
                    phases_ms={"pod": round((time.perf_counter() - began) * 1000, 3)},
                )
                held.push_async_callback(keep_if_passed_on, entry, found)
                yield found
        except CriuError as e:
            raise Unsupported(f"the pod cannot be entered: {e}") from e

    async def furnish(
        self, spec: LaunchSpec, peer: socket.socket, *, code: Path, weights: Mapping[str, Path]
    ) -> Mapping[str, Any]:
        """Build in the pod the tree of a slot for an environment of this node, which the pod's own
        image does not have; returns what the launcher executes there: `argv`, `env`, `work`,
        and the number of the control channel. Raises BundleUnavailable, Unsupported, OSError."""
        stock, sources = self._environments.stock(), self._environments.sources(spec, code, weights)
        if sources.layout.rootfs is not None:
            raise Unsupported(f"{spec.revision} has a root file system of its own: it is `booted`")
        pidfd = pidfd_of_peer(peer)
        try:
            require_own_namespaces(pidfd)
            with self._environments.planned(spec, sources) as (plan, _):
                brought = self._environments.brought(spec, sources, plan, restores=False)
                async with entered(self._processes, pidfd, brought, stock.kit):
                    shown = {name: plan.order[name] for name in ("argv", "env", "work")}
                    return {**shown, "control_fd": plan.launch_file["control_fd"]}
        except CriuError as e:
            raise Unsupported(f"the pod cannot be entered: {e}") from e
        finally:
            os.close(pidfd)

    def _booted_env(
        self, spec: LaunchSpec, planned: Mapping[str, str], gpus: Sequence[str]
    ) -> dict[str, str]:
        """Variables of a worker that is booted in a pod: as in a slot, with the pod's GPUs and the
        pod's way to other functions."""
        env = {name: value for name, value in planned.items() if name != VISIBLE_DEVICES}
        if gpus:
            env[VISIBLE_DEVICES] = ",".join(gpus)
        if not spec.offline:
            env[CALLS_VARIABLE] = str(self._environments.node_directory / POD_CALLS_SOCKET)
        return env

"""One pod on a node: its address, its container as a process, its queue-proxy, its probes, its
status, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import shutil
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from pilotlight.kubernetes.errors import ClusterError, Conflict
from pilotlight.kubernetes.kinds import POD
from tests.fakes.knative import container as container_program
from tests.fakes.knative import volumes
from tests.fakes.knative.controllers import View, condition, now
from tests.fakes.knative.images import Images
from tests.fakes.knative.logs import ContainerLog
from tests.fakes.knative.pod_group import PodGroup
from tests.fakes.knative.queue_proxy import QueueProxy
from tests.fakes.knative.revisions import QUEUE_PROXY

Json = dict[str, Any]
log = logging.getLogger(__name__)
PROBE_S = 0.05
RETRY_S = 0.3
"""Between attempts to pull an image, or to find a volume (a real kubelet backs off to minutes)."""
BACK_OFF_S = (0.2, 1.0, 3.0, 10.0)
RELIST_S = 0.5
"""How long a kubelet does not know that a container ended: it looks once a second."""
LEAST_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL, however short the grace is (the kubelet's minimum)."""
KILLED = 137


class PodRunner:
    """Owner: the event loop; `run` is its task.

    Attributes:
        proxy: stands before the worker.
        is_ready: what the kubelet says of it.
    """

    def __init__(
        self,
        view: View,
        pod: Json,
        *,
        ip: str,
        directory: Path,
        images: Images,
        quiet_s: float,
    ) -> None:
        """`quiet_s`: how long queue-proxy holds the end of a pod after its last request."""
        self._view = view
        self.pod = pod
        self.ip = ip
        self._directory = directory
        self._images = images
        self._user = next(one for one in pod["spec"]["containers"] if one["name"] != QUEUE_PROXY)
        self._beside = any(one["name"] == QUEUE_PROXY for one in pod["spec"]["containers"])
        self.log = ContainerLog(directory / "log")
        self._keeping: asyncio.Task[None] | None = None
        self._group = PodGroup(pod["metadata"]["uid"])
        self.proxy = QueueProxy(ip, concurrency=_concurrency(pod))
        self._process: asyncio.subprocess.Process | None = None
        self._proxy_process: asyncio.subprocess.Process | None = None
        self._ending = asyncio.Event()
        self._quiet_s = quiet_s
        self._ends_by = math.inf
        self._phase = "Pending"
        self._state: Json = {"waiting": {"reason": "ContainerCreating"}}
        self._last: Json = {}
        self._restarts = 0
        self._reason = ""
        self._started = now()
        self._disruption: Json | None = None
        self._reports: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None
        self.is_ready = False

    def __repr__(self) -> str:
        return (
            f"<PodRunner {self.pod['metadata']['name']} {self.ip} {self._phase} "
            f"ready={self.is_ready}>"
        )

    @property
    def log_path(self) -> Path:
        """What its container printed, each line with its time."""
        return self.log.path

    @property
    def pid(self) -> int:
        """Of the container's first process on this machine; 0 = none runs."""
        return (
            self._process.pid
            if self._process is not None and self._process.returncode is None
            else 0
        )

    # -- told --------------------------------------------------------------------------------------
    def end(self, grace_s: float) -> None:
        """It was deleted; or again, with less grace."""
        self._ends_by = min(self._ends_by, asyncio.get_running_loop().time() + grace_s)
        self._ending.set()

    def evict(self, message: str) -> None:
        """The node is under pressure: the container is killed, the pod stays behind as failed."""
        if self._phase == "Failed":
            return
        self._disruption = condition("DisruptionTarget", True, "TerminationByKubelet", message)
        self._phase, self._reason = "Failed", "Evicted"
        self.kill()

    def run_out_of_memory(self) -> None:
        """The kernel kills its container, once."""
        if not self._restarts:
            self.kill(reason="OOMKilled")

    def kill(self, *, reason: str = "") -> None:
        """Kill the container; `reason` (`OOMKilled`) is what the kubelet will say."""
        self._reason = reason or self._reason
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def reaped(self) -> None:
        """Until the container's process is gone and its log is read: for who cut the pod off while
        it ended."""
        for process in (self._process, self._proxy_process):
            if process is not None:
                await process.wait()
        if self._keeping is not None:
            await asyncio.wait([self._keeping])

    # -- the life ----------------------------------------------------------------------------------
    async def run(self) -> None:
        """From its node to its end."""
        self._directory.mkdir(parents=True)
        self._directory.chmod(0o755)
        try:
            with contextlib.suppress(_Ended):
                await self._live()
            await self._finish()
        finally:
            try:
                await self._clean()
            finally:
                self._group.remove()

    async def _live(self) -> None:
        await self._report()
        await self._pull()
        if self._beside:
            await self.proxy.start()
            await self._start_proxy_process()
        while self._phase != "Failed":
            spec = await self._prepare()
            await self._start(spec)
            await self._until_exit()
            if self._ending.is_set() or self._phase == "Failed":
                return
            await self._back_off()

    async def _start_proxy_process(self) -> None:
        """What a node agent sees of queue-proxy: the first process of a container of the pod. If it
        is killed while the pod ends, nothing holds the pod any more."""
        group = self._group.make()
        if group is None:
            return
        (program := self._directory / "queue").symlink_to("/bin/sleep")
        enter = f"echo $$ > {group} && exec unshare --pid --fork --kill-child {program} infinity"
        self._proxy_process = await asyncio.create_subprocess_exec("sh", "-c", enter)

    async def _pull(self) -> None:
        image, attempt = self._user["image"], 0
        while (message := await self._images.pull(self._view.cluster, self.pod, image)) is not None:
            reason = "ErrImagePull" if attempt == 0 else "ImagePullBackOff"
            said = (
                message
                if attempt == 0
                else f'Back-off pulling image "{image}": ErrImagePull: {message}'
            )
            await self._wait_because(reason, said)
            attempt += 1

    async def _wait_because(self, reason: str, message: str) -> None:
        self._state = {"waiting": {"reason": reason, "message": message}}
        await self._report()
        await self._pause(RETRY_S)

    async def _pause(self, seconds: float) -> None:
        await _within(seconds, self._ending.wait())
        if self._ending.is_set():
            raise _Ended

    async def _prepare(self) -> Path:
        while True:
            try:
                mounted = await volumes.mounts(
                    self._view.cluster, self.pod, self._user, self._directory
                )
                env = await volumes.environment(
                    self._view.cluster, self.pod, self._user, ip=self.ip
                )
                break
            except volumes.Missing as e:
                await self._wait_because("CreateContainerConfigError", str(e))
            except ClusterError as e:
                log.info("not yet pod=%s error=%s", self.pod["metadata"]["name"], e)
                await self._pause(RETRY_S)
        port = next((one["containerPort"] for one in self._user.get("ports") or ()), 8080)
        env = {
            **self._images.env(self._user["image"]),
            **env,
            "PILOTLIGHT_LISTEN": f"{self.ip}:{port}",
        }
        return self._spec(mounted, env)

    def _spec(self, mounted: list[Json], env: dict[str, str]) -> Path:
        security = {
            **(self.pod["spec"].get("securityContext") or {}),
            **(self._user.get("securityContext") or {}),
        }
        root = self._directory / "root"
        root.mkdir(exist_ok=True)
        argv = [
            *(self._user.get("command") or self._images.argv(self._user["image"])),
            *(self._user.get("args") or ()),
        ]
        group = self._group.make()
        spec = {
            "group": "" if group is None else str(group),
            "root": str(root),
            "image": str(self._images.root(self._user["image"]) or ""),
            "volumes": mounted,
            "visible": self._images.visible(),
            "hostname": self.pod["metadata"]["name"][:63],
            "read_only_root": bool(security.get("readOnlyRootFilesystem")),
            "uid": security.get("runAsUser", 0),
            "gid": security.get("runAsGroup", 0),
            "cwd": self._user.get("workingDir") or "/",
            "argv": argv,
            "env": env,
        }
        path = self._directory / "container.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(spec))
        return path

    async def _start(self, spec: Path) -> None:
        self._reason = ""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            container_program.__file__,
            str(spec),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd="/",
        )
        assert self._process.stdout is not None
        self._keeping = asyncio.create_task(
            self.log.keep(self._process.stdout), name="container's log"
        )
        self._phase, self._state = "Running", {"running": {"startedAt": now()}}
        await self._report()

    async def _until_exit(self) -> None:
        assert self._process is not None
        exited = asyncio.create_task(self._process.wait())
        probing = asyncio.create_task(self._probe())
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({exited, ending}, return_when=asyncio.FIRST_COMPLETED)
            probing.cancel()
            if not exited.done():
                await self._drain_and_stop(exited)
            elif self._phase != "Failed":
                await _within(RELIST_S, self._ending.wait())
            if self._keeping is not None:
                await self._keeping
            self._exited(exited.result())
        finally:
            for task in (probing, ending, exited):
                task.cancel()
            await asyncio.gather(probing, ending, exited, return_exceptions=True)

    async def _probe(self) -> None:
        """Until it answers; one that does not within its startup probe's time is killed."""
        probe = self._user.get("startupProbe") or {}
        until = asyncio.get_running_loop().time() + probe.get("failureThreshold", 600) * probe.get(
            "periodSeconds", 1
        )
        while not await self._answers():
            if asyncio.get_running_loop().time() > until:
                self.kill(reason="Error")
                return
            await asyncio.sleep(PROBE_S)
        self.is_ready = self.proxy.is_ready = True
        await self._report()

    async def _answers(self) -> bool:
        asked = (self._user.get("startupProbe") or _proxy_probe(self.pod)).get("httpGet")
        port = asked["port"] if asked and asked.get("port") else 8080
        try:
            reader, writer = await asyncio.open_connection(self.ip, port)
        except OSError:
            return False
        try:
            if asked is None:
                return True
            lines = [
                f"GET {asked.get('path') or '/'} HTTP/1.1",
                f"host: {self.ip}",
                "user-agent: kube-probe",
                "connection: close",
                "",
                "",
            ]
            writer.write("\r\n".join(lines).encode())
            async with asyncio.timeout(2):
                return (await reader.readline()).split(b" ")[1:2] == [b"200"]
        except OSError:
            return False
        finally:
            writer.close()

    async def _drain_and_stop(self, exited: asyncio.Task[int]) -> None:
        """As Knative ends a pod: not ready; SIGTERM once queue-proxy has had no request for its quiet
        period, whatever runs; SIGKILL when the grace is over. Neither the container's own end nor a
        second deletion with less grace interrupts a kubelet that waits for queue-proxy, but the end
        of queue-proxy does (seen with 1.36)."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        waits_until = self._ends_by
        self.is_ready = self.proxy.is_ready = False
        await self._report()
        draining = asyncio.create_task(self.proxy.drain(self._quiet_s), name="drain")
        try:
            while loop.time() < waits_until and not (draining.done() or self._is_proxy_dead):
                await asyncio.sleep(PROBE_S)
        finally:
            draining.cancel()
        if self._process.returncode is None:
            self._process.terminate()
        least = loop.time() + LEAST_GRACE_S
        while loop.time() < max(self._ends_by, least) and not exited.done():
            await asyncio.wait([exited], timeout=PROBE_S)
        if self._process.returncode is None:
            self._process.kill()
        await exited

    @property
    def _is_proxy_dead(self) -> bool:
        return self._proxy_process is not None and self._proxy_process.returncode is not None

    def _exited(self, code: int) -> None:
        code = 128 - code if code < 0 else code
        self.is_ready = self.proxy.is_ready = False
        reason = (
            self._reason if self._reason == "OOMKilled" else ("Completed" if code == 0 else "Error")
        )
        message = (
            self.log.tail()
            if self._user.get("terminationMessagePolicy") == "FallbackToLogsOnError" and code
            else ""
        )
        ended = {
            "exitCode": code,
            "reason": reason,
            "startedAt": self._started,
            "finishedAt": now(),
        } | ({"message": message} if message else {})
        self._state = {"terminated": ended}

    async def _back_off(self) -> None:
        self._last, self._restarts = self._state, self._restarts + 1
        pause_s = BACK_OFF_S[min(self._restarts - 1, len(BACK_OFF_S) - 1)]
        if self._restarts > 1:
            text = f"back-off {pause_s:g}s restarting failed container={self._user['name']}"
            self._state = {"waiting": {"reason": "CrashLoopBackOff", "message": text}}
        else:
            self._state = {"waiting": {"reason": "ContainerCreating"}}
        await self._report()
        await self._pause(pause_s)

    # -- the end -----------------------------------------------------------------------------------
    async def _finish(self) -> None:
        if self._phase == "Failed":
            await self._report()
            await self.proxy.stop()
            await self._ending.wait()
        metadata = self.pod["metadata"]
        while True:
            try:
                await self._view.cluster.delete(
                    POD, metadata["name"], metadata["namespace"], uid=metadata["uid"], grace_s=0
                )
                return
            except Conflict:
                return
            except ClusterError as e:
                log.info("not deleted yet pod=%s error=%s", metadata["name"], e)
                await asyncio.sleep(RETRY_S)

    async def _clean(self) -> None:
        # before the first await: a node that stops cancels pods that are ending already
        self.proxy.close()
        if self._proxy_process is not None and self._proxy_process.returncode is None:
            self._proxy_process.kill()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._keeping is not None:
            await self._keeping
        if self._proxy_process is not None:
            await self._proxy_process.wait()
        await self.proxy.stop()
        if self._again is not None:
            self._again.cancel()
        for task in self._reports:
            task.cancel()
        shutil.rmtree(self._directory, ignore_errors=True)

    # -- said --------------------------------------------------------------------------------------
    async def _report(self) -> None:
        """Write the status; while the API server is away the pod lives on, and the next report
        tells."""
        status = self._status()
        item = self._view.get(POD, self.pod["metadata"]["namespace"], self.pod["metadata"]["name"])
        if item is None or item["metadata"]["uid"] != self.pod["metadata"]["uid"]:
            item = self.pod
        kept = [
            one
            for one in (item.get("status") or {}).get("conditions") or ()
            if one["type"] == "DisruptionTarget"
        ]
        status["conditions"] += kept if self._disruption is None else []
        try:
            await self._view.set_status(POD, item, status)
        except ClusterError as e:
            log.info("not reported pod=%s error=%s", self.pod["metadata"]["name"], e)
            self._again = asyncio.get_running_loop().call_later(RETRY_S, self._report_again)

    def _report_again(self) -> None:
        """What could not be told is told until it is."""
        task = asyncio.create_task(self._report(), name="report")
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    def _status(self) -> Json:
        parts = [
            condition("PodScheduled", True),
            condition("Initialized", True),
            condition("ContainersReady", self.is_ready),
        ]
        parts += [
            condition("Ready", self.is_ready),
            *([self._disruption] if self._disruption else []),
        ]
        is_running = "running" in self._state
        user = {
            "name": self._user["name"],
            "image": self._user["image"],
            "imageID": self._user["image"],
            "ready": self.is_ready,
            "started": is_running,
            "restartCount": self._restarts,
            "state": self._state,
            "lastState": self._last,
        }
        proxy = {
            "name": QUEUE_PROXY,
            "image": "registry.example/knative/queue",
            "imageID": "",
            "ready": self.is_ready,
            "restartCount": 0,
            "state": {"running": {"startedAt": self._started}}
            if is_running
            else {"waiting": {"reason": "ContainerCreating"}},
            "lastState": {},
            "started": is_running,
        }
        status: Json = {
            "phase": self._phase,
            "podIP": self.ip,
            "podIPs": [{"ip": self.ip}],
            "hostIP": "127.0.0.1",
            "conditions": parts,
        }
        status |= {
            "containerStatuses": [user, *([proxy] if self._beside else [])],
            "startTime": self._started,
        }
        return status | (
            {"reason": self._reason, "message": (self._disruption or {}).get("message", "")}
            if self._phase == "Failed"
            else {}
        )


class _Ended(Exception):
    """Raised inside when the pod was deleted before its container ran."""


async def _within(seconds: float, what: Awaitable[object]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await what


def _concurrency(pod: Json) -> int:
    for one in pod["spec"]["containers"]:
        if one["name"] == QUEUE_PROXY:
            return int(next(e["value"] for e in one["env"] if e["name"] == "CONTAINER_CONCURRENCY"))
    return 0


def _proxy_probe(pod: Json) -> Json:
    """The user's readiness probe, which Knative gives to queue-proxy."""
    for one in pod["spec"]["containers"]:
        if one["name"] == QUEUE_PROXY:
            found: Json = json.loads(
                next(e["value"] for e in one["env"] if e["name"] == "SERVING_READINESS_PROBE")
            )
            return found
    return {}

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
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any

from pilotlight.kubernetes.errors import ClusterError, Conflict
from pilotlight.kubernetes.kinds import POD
from pilotlight.protocol import POD_CONTROL_PORT
from tests.fakes.knative import container as container_program
from tests.fakes.knative import volumes
from tests.fakes.knative.controllers import View, condition, now
from tests.fakes.knative.images import Images
from tests.fakes.knative.logs import ContainerLog
from tests.fakes.knative.pod_group import PodGroup
from tests.fakes.knative.queue_proxy import QueueProxy
from tests.fakes.knative.revisions import QUEUE_PROXY
from tests.fakes.kubernetes.quotas import amount

Json = dict[str, Any]
log = logging.getLogger(__name__)
OWN_NETWORK = "198.18."
"""Begin of the addresses of pods that have a network of their own: those of RFC 2544, which nobody
routes. The others have addresses of the machine's loopback, as their queue-proxy does, which runs
in this process."""
PROBE_S = 0.05
RETRY_S = 0.3
"""Between attempts to pull an image, or to find a volume (a real kubelet backs off to minutes)."""
BACK_OFF_S = (0.2, 1.0, 3.0, 10.0)
ACTUATE_S, RESIZE_RETRY_S = 0.1, 1.0
"""Between a change of a pod's resources and that of its control group, and after one that failed."""
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
        present: asyncio.Event,
    ) -> None:
        """`quiet_s`: how long queue-proxy holds the end of a pod after its last request; `present`:
        set while the kubelet runs, without which containers go on and nothing is reported, started
        or ended."""
        self._view = view
        self._present = present
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
        self._pending: Json | None = None
        self._in_progress: Json | None = None
        self._actual = self._user.get("resources") or {}
        self._actuating: asyncio.Task[None] | None = None
        self._oom_kills = 0
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

    def resize(self, pod: Json, *, problem: Json | None) -> None:
        """Its resources were changed: the node sets aside what it wants and then gives it to the
        container, without a restart, or says why not (Kubernetes: "Resize CPU and Memory Resources
        assigned to Containers")."""
        wanted = [one.get("resources") for one in pod["spec"]["containers"]]
        if wanted == [one.get("resources") for one in self.pod["spec"]["containers"]]:
            problem = None
        elif problem is None:
            self.pod = pod
            self._user = next(c for c in pod["spec"]["containers"] if c["name"] != QUEUE_PROXY)
            self._in_progress = condition("PodResizeInProgress", True)
            if self._actuating is not None:
                self._actuating.cancel()
            self._actuating = asyncio.create_task(self._actuate(), name="resize")
        elif problem == self._pending:
            return
        else:
            self._pending = problem
            self._report_again()
            return
        if self._pending is not None or self.pod is pod:
            self._pending = None
            self._report_again()

    @property
    def is_deferred(self) -> bool:
        """Whether it waits for room on its node."""
        return (self._pending or {}).get("reason") == "Deferred"

    async def _actuate(self) -> None:
        """Have the kernel apply the new limit. One below what is used is tried again (kubelet,
        `validateMemoryResizeAction`)."""
        await asyncio.sleep(ACTUATE_S)
        while (problem := self._apply_limit()) is not None:
            failed = condition("PodResizeInProgress", True, "Error", problem)
            if failed != self._in_progress:
                self._in_progress = failed
                await self._report()
            await asyncio.sleep(RESIZE_RETRY_S)
        self._actual, self._in_progress = self._user.get("resources") or {}, None
        await self._report()

    def _apply_limit(self) -> str | None:
        limit, before = _limit(self._user), _limit({"resources": self._actual})
        if limit is None:
            return None
        used = self._group.used_bytes()
        if before is not None and limit < before and used >= limit:
            return (
                f"cannot decrease memory limits: attempting to set pod memory limit ({limit}) below "
                f"current usage ({used})"
            )
        try:
            self._group.set_limit(limit)
        except OSError as e:
            return f"cannot decrease memory limits: {e.strerror}"
        return None

    def kill(self, *, reason: str = "") -> None:
        """Kill the container; `reason` (`OOMKilled`) is what the kubelet will say."""
        self._reason = reason or self._reason
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def reaped(self) -> None:
        """Until the container's process is gone and its log is read."""
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
                await _uninterrupted(self._clean(), name="pod's end")
            finally:
                self._group.remove()

    async def _live(self) -> None:
        await self._report()
        await self._pull()
        if self._beside:
            await self.proxy.start()
            await self._start_proxy_process()
        while self._phase != "Failed":
            await self._present.wait()
            if self._ending.is_set():  # a pod that is being deleted is not started
                return
            spec = await self._prepare()
            await self._start(spec)
            await self._until_exit()
            if self._ending.is_set() or self._phase == "Failed" or self._is_over():
                return
            await self._back_off()

    def _is_over(self) -> bool:
        """Whether the container is not started again, by the pod's `restartPolicy`."""
        policy = self.pod["spec"].get("restartPolicy", "Always")
        is_good = self._state["terminated"]["exitCode"] == 0
        if policy == "Always" or (policy == "OnFailure" and not is_good):
            return False
        self._phase = "Succeeded" if is_good else "Failed"
        return True

    async def _start_proxy_process(self) -> None:
        """What a node agent sees of queue-proxy: the first process of a container of the pod. If it
        is killed while the pod ends, nothing holds the pod any more."""
        groups = self._group.make()
        if not groups:
            return
        (program := self._directory / "queue").symlink_to("/bin/sleep")
        enter = (
            f"echo $$ > {groups[0]} && exec unshare --pid --fork --kill-child {program} infinity"
        )
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
        env = {
            **self._images.env(self._user["image"]),
            **env,
            # a pod's processes do not share their ports with other pods' on the same machine
            "PILOTLIGHT_LISTEN": f"{self.ip}:{self._port()}",
            "PILOTLIGHT_CONTROL": f"{self.ip}:{POD_CONTROL_PORT}",
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
        groups = self._group.make()
        if (limit := _limit(self._user)) is not None:
            self._group.set_limit(limit)
        spec = {
            "groups": [str(group) for group in groups],
            "address": self.ip if self.ip.startswith(OWN_NETWORK) else "",
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
                await asyncio.shield(self._keeping)
            self._exited(exited.result())
        finally:
            for task in (probing, ending, exited):
                task.cancel()
            await asyncio.gather(probing, ending, exited, return_exceptions=True)

    async def _probe(self) -> None:
        """Until it answers; one that does not within its startup probe's time is killed. A container
        that nobody stands before is asked again and again, as its readiness probe says."""
        startup = self._user.get("startupProbe") or _proxy_probe(self.pod)
        until = asyncio.get_running_loop().time() + _patience_s(startup)
        while (startup or self._beside) and not await self._answers(startup):
            if asyncio.get_running_loop().time() > until:
                self.kill(reason="Error")
                return
            await asyncio.sleep(PROBE_S)
        if not self._beside:
            await self._follow_readiness(self._user.get("readinessProbe"))
            return
        self.is_ready = self.proxy.is_ready = True
        await self._report()

    async def _follow_readiness(self, probe: Json | None) -> None:
        """Ready from the first answer on, until `failureThreshold` of them are missing."""
        missed, period_s = 0, float((probe or {}).get("periodSeconds", 10))
        while True:
            answers = probe is None or await self._answers(probe)
            missed = 0 if answers else missed + 1
            is_ready = answers or (
                self.is_ready and missed < (probe or {}).get("failureThreshold", 3)
            )
            if is_ready != self.is_ready:
                self.is_ready = is_ready
                await self._report()
            if probe is None:
                return
            await asyncio.sleep(period_s if self.is_ready else min(PROBE_S, period_s))

    async def _answers(self, probe: Json) -> bool:
        """By `httpGet`, else `tcpSocket`; without either, whether it listens."""
        asked = probe.get("httpGet")
        wanted = (asked or probe.get("tcpSocket") or {}).get("port")
        try:
            reader, writer = await asyncio.open_connection(self.ip, self._port(wanted))
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
            async with asyncio.timeout(max(2, probe.get("timeoutSeconds", 1))):
                status = (await reader.readline()).split(b" ")[1:2]
            return bool(status) and status[0].isdigit() and 200 <= int(status[0]) < 400
        except OSError:
            return False
        finally:
            writer.close()

    def _port(self, wanted: int | str | None = None) -> int:
        """A port by its number or name; else that of calls: the first one, that of a warm pod's
        launcher left out."""
        ports = self._user.get("ports") or ()
        if isinstance(wanted, str):
            return next(int(one["containerPort"]) for one in ports if one["name"] == wanted)
        numbers = [one["containerPort"] for one in ports]
        return wanted or next((one for one in numbers if one != POD_CONTROL_PORT), 8080)

    async def _drain_and_stop(self, exited: asyncio.Task[int]) -> None:
        """Without queue-proxy, SIGTERM at once. As Knative ends a pod: not ready; SIGTERM once queue-proxy has had no request for its quiet
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
            while (
                self._beside
                and loop.time() < waits_until
                and not (draining.done() or self._is_proxy_dead)
            ):
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
        kills = self._group.oom_kills()
        if code == KILLED and kills > self._oom_kills:
            self._reason = "OOMKilled"
        self._oom_kills = kills
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
        if self._phase in ("Failed", "Succeeded"):
            await self._report()
            await self.proxy.stop()
            await self._ending.wait()
        metadata = self.pod["metadata"]
        while True:
            await self._present.wait()
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
        self.proxy.close()
        processes = [one for one in (self._process, self._proxy_process) if one is not None]
        for process in processes:
            if process.returncode is None:
                process.kill()
        await self.reaped()
        await self.proxy.stop()
        if self._again is not None:
            self._again.cancel()
        tasks = [*self._reports, *([self._actuating] if self._actuating is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        shutil.rmtree(self._directory, ignore_errors=True)

    # -- said --------------------------------------------------------------------------------------
    async def _report(self) -> None:
        """Write the status; while the API server is away the pod lives on, and the next report
        tells."""
        await self._present.wait()
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
            *([self._pending] if self._pending else []),
            *([self._in_progress] if self._in_progress else []),
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
            "allocatedResources": (self._user.get("resources") or {}).get("requests") or {},
            "resources": self._actual,
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


async def _uninterrupted(work: Coroutine[Any, Any, None], *, name: str) -> None:
    """Wait for its end, however often the caller is cancelled: a node that stops cancels pods that
    are ending already."""
    task = asyncio.create_task(work, name=name)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    task.result()


async def _within(seconds: float, what: Awaitable[object]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await what


def _limit(container: Json) -> int | None:
    limits = (container.get("resources") or {}).get("limits") or {}
    return round(amount(limits["memory"])) if "memory" in limits else None


def _patience_s(startup: Json) -> float:
    return float(startup.get("failureThreshold", 600) * startup.get("periodSeconds", 1))


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

"""Knative's KPA: per revision two windows, a decision each tick, and a PodAutoscaler,
ServerlessService and Deployment that follow it.

The decision is `activator.autoscaler.kpa.step`, whose numbers are held against Knative's own tests.
PodAutoscalers of another class are left alone. Source of behaviour: knative/serving
pkg/reconciler/autoscaling/kpa, pkg/autoscaler/scaling."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from activator.autoscaler import kpa
from activator.autoscaler.windows import TimeWindow
from pilotlight.kubernetes.kinds import DEPLOYMENT, POD, POD_AUTOSCALER, SERVERLESS_SERVICE
from tests.fakes.knative.activator import Activator
from tests.fakes.knative.controllers import Controller, Key, View, condition, condition_of, owned
from tests.fakes.knative.queue_proxy import QueueProxy
from tests.fakes.kubernetes.knative_webhook import duration_s

Json = dict[str, Any]
CLASS = "kpa.autoscaling.knative.dev"
TICK_S, SCRAPE_S = 2.0, 1.0
_A = "autoscaling.knative.dev/"


@dataclass(kw_only=True)
class Terms:
    """One revision's annotations, read. `max_scale` 0 = none."""

    spec: kpa.KpaSpec
    window_s: float
    panic_s: float
    retention_s: float
    min_scale: int
    max_scale: int
    initial_scale: int


@dataclass(kw_only=True)
class Scaler:
    """One revision's memory."""

    terms: Terms
    stable: TimeWindow
    panic: TimeWindow
    state: kpa.KpaState
    desired: int = -1
    active: str = ""
    active_since: float = 0.0
    initialized: bool = False


class Autoscaler(Controller):
    """All revisions of class KPA. `proxies(namespace, revision)`: queue-proxies of its pods that
    are ready; `speed`: how much faster than the clock its time runs, so that tests need not wait a
    minute; `grace_s`: scale-to-zero-grace-period."""

    def __init__(
        self,
        view: View,
        *,
        proxies: Callable[[str, str], Sequence[QueueProxy]],
        speed: float = 1.0,
        grace_s: float = 30.0,
    ) -> None:
        super().__init__(view)
        self._proxies = proxies
        self._speed = speed
        self._grace_s = grace_s
        self._scalers: dict[Key, Scaler] = {}
        self._second = 0  # of the windows: each scrape is one, however late it comes
        self.activator: Activator | None = None
        view.on(POD_AUTOSCALER, self.enqueue)
        view.on(DEPLOYMENT, self._named_for_revision)
        view.on(POD, self._named_for_revision)
        view.on(SERVERLESS_SERVICE, self.enqueue)

    def _named_for_revision(self, item: Json) -> None:
        revision = (item["metadata"].get("labels") or {}).get("serving.knative.dev/revision")
        if revision:
            self.look_at((item["metadata"]["namespace"], revision))

    def _now(self) -> float:
        return time.monotonic() * self._speed

    def poke(self, namespace: str, revision: str) -> None:
        """A request waits: decide at once where the scale is zero."""
        scaler = self._scalers.get((namespace, revision))
        if scaler is not None and scaler.desired <= 0:
            scaler.stable.record(self._second, 1.0)
            scaler.panic.record(self._second, 1.0)
            self._decide((namespace, revision), scaler)

    async def run(self) -> None:
        """Reconcile, scrape, decide, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().run(), name="podautoscalers")
            tasks.create_task(self._every(SCRAPE_S / self._speed, self._scrape), name="scrape")
            tasks.create_task(self._every(TICK_S / self._speed, self._tick), name="decide")

    async def _every(self, seconds: float, work: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(seconds)
            work()

    def _scrape(self) -> None:
        self._second += 1
        for (namespace, revision), scaler in self._scalers.items():
            load = (
                self.activator.take_average(namespace, revision)
                if self.activator is not None
                else 0.0
            )
            for proxy in self._proxies(namespace, revision):
                load += proxy.load.take_average() - proxy.proxied.take_average()
            scaler.stable.record(self._second, max(0.0, load))
            scaler.panic.record(self._second, max(0.0, load))

    def _tick(self) -> None:
        for key, scaler in self._scalers.items():
            self._decide(key, scaler)

    def _decide(self, key: Key, scaler: Scaler) -> None:
        now = self._now()
        at = self._second
        loads = [
            None if window.is_empty(at) else window.average(at)
            for window in (scaler.stable, scaler.panic)
        ]
        ready = len(self._proxies(*key))
        decision, scaler.state = kpa.step(
            now,
            kpa.KpaLoad(stable=loads[0], panic=loads[1], ready=ready),
            scaler.terms.spec,
            scaler.state,
        )
        if decision.valid:
            changed, scaler.desired = decision.desired != scaler.desired, decision.desired
            if changed or scaler.active != "False":
                self.look_at(key)

    async def reconcile(self, namespace: str, name: str) -> None:
        """Bring the Deployment, the ServerlessService and the status to the decision."""
        item = self.view.get(POD_AUTOSCALER, namespace, name)
        key = (namespace, name)
        if item is None or item["metadata"].get("deletionTimestamp"):
            self._scalers.pop(key, None)
            return
        if (item["metadata"].get("annotations") or {}).get(f"{_A}class", CLASS) != CLASS:
            return
        scaler = self._scalers.get(key) or self._begin(key, item)
        scaler.terms = terms_of(item)
        deployment = self.view.get(DEPLOYMENT, namespace, item["spec"]["scaleTargetRef"]["name"])
        if deployment is None:
            return
        want = self._scale(key, item, scaler, deployment["spec"].get("replicas", 1))
        if want is not None and want != deployment["spec"].get("replicas", 1):
            await self.view.patch(DEPLOYMENT, deployment, {"spec": {"replicas": want}})
        await self._serverless_service(item, scaler)
        await self._report(
            item, scaler, deployment["spec"].get("replicas", 1) if want is None else want
        )

    def _begin(self, key: Key, item: Json) -> Scaler:
        terms, ready = terms_of(item), len(self._proxies(*key))
        windows = TimeWindow(terms.window_s), TimeWindow(terms.panic_s)
        state = kpa.initial_state(self._now(), spec=terms.spec, ready=ready)
        scaler = Scaler(
            terms=terms, stable=windows[0], panic=windows[1], state=state, active_since=self._now()
        )
        known = condition_of(item, "Active")
        scaler.active = known.get("status", "")
        scaler.initialized = condition_of(item, "ScaleTargetInitialized").get("status") == "True"
        self._scalers[key] = scaler
        return scaler

    def _scale(self, key: Key, item: Json, scaler: Scaler, present: int) -> int | None:
        """The number of pods; None = leave it (no decision yet, or not the time)."""
        terms, reachable = scaler.terms, item["spec"].get("reachability") != "Unreachable"
        low = terms.min_scale if reachable else 0
        if not scaler.initialized and reachable:
            low = max(low, terms.initial_scale)
        desired = scaler.desired
        if desired < 0:
            desired = low if not scaler.initialized else present
        desired = max(desired, low)
        if terms.max_scale:
            desired = min(desired, terms.max_scale)
        ready = len(self._proxies(*key))
        if not scaler.initialized and ready >= max(terms.min_scale, terms.initial_scale):
            scaler.initialized = True
        return (
            self._to_zero(key, scaler, present, reachable=reachable)
            if desired == 0
            else self._above_zero(scaler, desired, ready)
        )

    def _above_zero(self, scaler: Scaler, desired: int, ready: int) -> int:
        wanted = "True" if ready >= max(1, scaler.terms.min_scale) else "Unknown"
        if scaler.active != wanted:
            scaler.active, scaler.active_since = wanted, self._now()
        return desired

    def _to_zero(self, key: Key, scaler: Scaler, present: int, *, reachable: bool) -> int | None:
        since_s = self._now() - scaler.active_since
        if present == 0:
            scaler.active = "False"
            return 0
        if scaler.active == "True":
            if since_s < scaler.terms.window_s:
                self.later(key, (scaler.terms.window_s - since_s) / self._speed)
                return 1
            scaler.active, scaler.active_since = "False", self._now()
            since_s = 0.0
        # nobody waits any more, but it is on its way: it has its window once it is there
        if scaler.active == "Unknown":
            if self._proxies(*key):
                scaler.active, scaler.active_since = "True", self._now()
                self.later(key, scaler.terms.window_s / self._speed)
            return None
        rest_s = max(self._grace_s, scaler.terms.retention_s if reachable else 0.0) - since_s
        if rest_s <= 0:
            return 0
        self.later(key, rest_s / self._speed)
        return None

    async def _serverless_service(self, item: Json, scaler: Scaler) -> None:
        metadata = item["metadata"]
        known = self.view.get(SERVERLESS_SERVICE, metadata["namespace"], metadata["name"])
        mode = (
            "Serve"
            if scaler.active == "True" and scaler.terms.spec.target_burst_capacity == 0
            else "Proxy"
        )
        spec = {
            "mode": mode,
            "objectRef": item["spec"]["scaleTargetRef"],
            "protocolType": "http1",
            "numActivators": 2,
        }
        if known is None:
            head = owned(
                SERVERLESS_SERVICE,
                POD_AUTOSCALER,
                item,
                metadata["name"],
                labels=metadata.get("labels") or {},
            )
            await self.view.create({**head, "spec": spec})
        elif known["spec"].get("mode") != mode:
            await self.view.patch(SERVERLESS_SERVICE, known, {"spec": {"mode": mode}})

    async def _report(self, item: Json, scaler: Scaler, desired: int) -> None:
        metadata = item["metadata"]
        sks = self.view.get(SERVERLESS_SERVICE, metadata["namespace"], metadata["name"])
        names = (sks or {}).get("status") or {}
        said = {
            "True": condition("Active", True),
            "Unknown": condition(
                "Active",
                None,
                "Queued",
                "Requests to the target are being buffered as resources are provisioned.",
            ),
        }.get(
            scaler.active,
            condition("Active", False, "NoTraffic", "The target is not receiving traffic."),
        )
        initialized = condition("ScaleTargetInitialized", True if scaler.initialized else None)
        parts = [
            said,
            initialized,
            condition("SKSReady", bool(names) or None),
            {**said, "type": "Ready"},
        ]
        ready = len(self._proxies(metadata["namespace"], metadata["name"]))
        status: Json = {
            "observedGeneration": metadata["generation"],
            "desiredScale": desired,
            "actualScale": ready,
            "conditions": parts,
        }
        status |= {"serviceName": names["serviceName"]} if "serviceName" in names else {}
        status |= (
            {"metricsServiceName": names["privateServiceName"]}
            if "privateServiceName" in names
            else {}
        )
        await self.view.set_status(POD_AUTOSCALER, item, status)


def terms_of(item: Json) -> Terms:
    """What a PodAutoscaler's annotations say, with Knative's defaults."""
    given = {
        key.removeprefix(_A): value
        for key, value in (item["metadata"].get("annotations") or {}).items()
        if key.startswith(_A)
    }
    concurrency = item["spec"].get("containerConcurrency") or 0
    total = float(given.get("target", concurrency or 100))
    total = min(total, concurrency) if concurrency else total
    window_s = duration_s(given["window"]) if "window" in given else 60.0
    panic_s = max(
        1.0, math.floor(window_s * float(given.get("panic-window-percentage", 10)) / 100 + 0.5)
    )
    spec = kpa.KpaSpec(
        target=max(0.01, total * float(given.get("target-utilization-percentage", 70)) / 100),
        total=total,
        stable_window_s=window_s,
        panic_threshold=float(given.get("panic-threshold-percentage", 200)) / 100,
        target_burst_capacity=float(given.get("target-burst-capacity", 211)),
        activation_scale=int(given.get("activation-scale", 0)),
        scale_down_delay_s=duration_s(given["scale-down-delay"])
        if "scale-down-delay" in given
        else 0.0,
        reachable=item["spec"].get("reachability") != "Unreachable",
    )
    retention = given.get("scale-to-zero-pod-retention-period")
    return Terms(
        spec=spec,
        window_s=window_s,
        panic_s=panic_s,
        retention_s=duration_s(retention) if retention else 0.0,
        min_scale=int(given.get("min-scale", 0)),
        max_scale=int(given.get("max-scale", 0)),
        initial_scale=int(given.get("initial-scale", 1)),
    )

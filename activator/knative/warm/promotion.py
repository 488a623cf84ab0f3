"""Promotes warm pods: asks the controller for one, and sends it what it is to run.

    activator ── which revision ──▶ controller        (claims a pod, answers with its address
                                                       and a signed launch document)
    activator ── document, secrets ──▶ pod, port 8079 (its launcher brings the worker up)

Both requests are bounded, and none is on the way of a call that finds an instance. A pod that does
not take its document is deleted and another one is tried; after that, and while the controller does
not answer, starts go the ordinary way.

A request whose answer is lost or late may have claimed a pod, with a slow API server as a rule. The
start then goes the ordinary way, too, and the controller is asked for that very pod a few times
more, by the id of the instance: it serves the start if it still waits, and is deleted if not."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from activator.knative.pod_watcher import Pod
from activator.knative.readiness_probe import exchange
from activator.knative.warm.source import PromotedPod
from activator.resilience.breaker import Breaker, BreakerTerms, Outcome
from activator.routing.route_table import CallTarget
from activator.worker_client.address import tcp_address
from activator.worker_client.connection import WorkerConnectionLost
from pilotlight.core.background_tasks import BackgroundTasks
from pilotlight.core.transport.controller_client import controller_client
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.protocol import POD_CONTROL_PORT, POD_PROMOTE, PODS_DELETE_PATH, PODS_PROMOTE_PATH

log = logging.getLogger(__name__)

TRIES = 2
"""Pods that one start tries: a second one that refuses is no coincidence."""
ASK_S = 2.0
"""Time-out of a request to the controller: it patches one pod, some 20 ms."""
SEND_S = 2.0
"""Time-out of the request to the pod, whose launcher has nothing else to do."""
MOST_ASKING = 64
"""Starts that ask at once; those beyond go the ordinary way, which has no such bound."""
FIND_PAUSES_S = (0.5, 1.0, 2.0, 3.0)
"""Pauses before each question for a pod whose claim was not answered. Other activators delete a
pod that was not sent its document after `unclaimed_pods.NO_DOCUMENT_S`."""
NONE_S = 0.5
"""For this long after the controller had no pod for a revision it is not asked again."""
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
TERMS = BreakerTerms(error_ratio=0.5, min_calls=2, open_s=2.0)
"""Two failures of the last ten seconds, if they are half of the requests, pause them."""


class _Unanswered(Exception):
    """Raised when the controller does not answer, or not in time.

    `is_sent`: whether it may have done, or may still do, what it was asked for."""

    def __init__(self, *, is_sent: bool) -> None:
        super().__init__(f"is_sent={is_sent}")
        self.is_sent = is_sent


class WarmPods:
    """`WarmPodSource` by the controller. Owner: the event loop."""

    def __init__(
        self,
        controller: Endpoint,
        *,
        token: str,
        member: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = controller_client(controller, token=token, timeout_s=ASK_S)
        self._member = member
        self._clock = clock
        self._breaker = Breaker(TERMS)
        self._asking = 0
        self._none_until: dict[str, float] = {}
        self._deletions = BackgroundTasks()

    def __repr__(self) -> str:
        return f"<WarmPods {self._asking} asking, controller {self._breaker.state}>"

    async def promote(
        self,
        target: CallTarget,
        instance_id: str,
        secret_env: Mapping[str, str],
        *,
        is_needed: Callable[[], bool],
        on_late: Callable[[], None],
    ) -> PromotedPod | None:
        """Promote a warm pod; None when there is none, or the controller or two pods failed.
        `is_needed` is asked before each pod; for `on_late` see `WarmPodSource`."""
        began = self._clock()
        if not self._may_ask(target, began):
            return None
        self._asking += 1
        try:
            refused: list[str] = []
            for _ in range(TRIES):
                if not is_needed():
                    return None
                try:
                    pod = await self._claim(target, instance_id, refused)
                except _Unanswered as e:
                    if not e.is_sent:
                        return None
                    on_late()
                    pod = await self._find(target, instance_id, refused)
                    if pod is not None and not is_needed():
                        self._delete_later(pod, "its start did not wait for it")
                        return None
                if pod is None:
                    return None
                if await self._send(pod, secret_env):
                    return replace(pod, took_ms=(self._clock() - began) * 1000)
                refused.append(pod.uid)
                self._delete_later(pod, "it did not take its launch document")
            return None
        finally:
            self._asking -= 1

    def _may_ask(self, target: CallTarget, now: float) -> bool:
        self._none_until = {key: until for key, until in self._none_until.items() if until > now}
        return (
            self._asking < MOST_ASKING
            and target.key not in self._none_until
            and self._breaker.admits(now)
        )

    async def _find(
        self, target: CallTarget, instance_id: str, refused: Sequence[str]
    ) -> PromotedPod | None:
        """The pod that a request without an answer claimed; None if it claimed none."""
        for pause_s in FIND_PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                pod = await self._claim(target, instance_id, refused, claimed_only=True)
            except _Unanswered:
                continue
            if pod is not None:
                log.info("late promotion found target=%r pod=%s", target, pod.name)
                return pod
        return None

    async def _claim(
        self,
        target: CallTarget,
        instance_id: str,
        refused: Sequence[str],
        *,
        claimed_only: bool = False,
    ) -> PromotedPod | None:
        """Claim a pod, or ask for the one that was claimed; None if there is none. Raises
        _Unanswered."""
        body = {
            "tenant": target.tenant,
            "revision": target.key,
            "attempt": instance_id,
            "member": self._member,
            "exclude": list(refused),
            **({"claimed_only": True} if claimed_only else {}),
        }
        answer = await self._request(PODS_PROMOTE_PATH, body)
        if answer.status_code != 200 and claimed_only:
            return None
        if answer.status_code != 200:
            # how many are left changes within moments; why this revision gets none does not
            self._none_until[target.key] = self._clock() + NONE_S
            log.info("no warm pod target=%r said=%s", target, answer.text[:200])
            return None
        try:
            return PromotedPod.parse(answer.json())
        except (ValueError, KeyError, TypeError) as e:
            log.error("invalid answer of the controller path=%s error=%r", PODS_PROMOTE_PATH, e)
            return None

    async def _request(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """Send a request to the controller. Raises _Unanswered when it does not answer, or
        cannot."""
        self._breaker.record_start(self._clock())
        outcome = Outcome.NEITHER
        try:
            async with asyncio.timeout(ASK_S):
                answer = await self._client.post(path, json=body)
            is_away = answer.status_code >= 500
            outcome = Outcome.FAILED if is_away else Outcome.ANSWERED
        except (httpx.HTTPError, TimeoutError) as e:
            outcome = Outcome.FAILED
            log.warning("the controller does not answer path=%s error=%r", path, e)
            raise _Unanswered(is_sent=not isinstance(e, _NOT_SENT)) from e
        finally:
            self._breaker.record_outcome(outcome, self._clock())
        if is_away:
            log.warning("the controller refuses path=%s status=%d", path, answer.status_code)
            raise _Unanswered(is_sent=_may_be_done(answer))
        return answer

    async def _send(self, pod: PromotedPod, secret_env: Mapping[str, str]) -> bool:
        """Send a pod its document; whether it accepted it."""
        body = json.dumps({"launch": pod.launch, "secrets": dict(secret_env)}).encode()
        head = (
            f"POST {POD_PROMOTE} HTTP/1.1\r\nhost: pod\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        try:
            async with asyncio.timeout(SEND_S):
                answer = await exchange(tcp_address(pod.ip, POD_CONTROL_PORT), head.encode() + body)
        except (OSError, WorkerConnectionLost) as e:  # TimeoutError is an OSError
            log.warning("warm pod does not answer pod=%s error=%r", pod.name, e)
            return False
        if answer.status != 202:
            log.warning(
                "warm pod refuses its document pod=%s status=%d said=%s",
                pod.name,
                answer.status,
                (answer.body or b"")[:200],
            )
        return answer.status == 202

    def _delete_later(self, pod: PromotedPod, reason: str) -> None:
        self._deletions.run(
            self._delete(pod.namespace, pod.name, pod.uid, reason), name=f"delete {pod.name}"
        )

    async def delete(self, pod: Pod, reason: str) -> bool:
        """Delete a promoted pod; False when the controller does not answer: then the pod is found
        again by `unclaimed_pods`."""
        return await self._delete(pod.namespace, pod.name, pod.uid, reason)

    async def _delete(self, namespace: str, name: str, uid: str, reason: str) -> bool:
        body = {"namespace": namespace, "name": name, "uid": uid, "reason": reason}
        try:
            answer = await self._request(PODS_DELETE_PATH, body)
            is_done = answer.is_success or answer.status_code == 404
        except _Unanswered:
            is_done = False
        if not is_done:
            log.warning("promoted pod not deleted pod=%s/%s", namespace, name)
        return is_done

    async def aclose(self) -> None:
        """Wait for deletions in progress, and close the connections."""
        await self._deletions.aclose()
        await self._client.aclose()


def _may_be_done(answer: httpx.Response) -> bool:
    """Whether a pod may have been claimed although the answer is an error: one of something in
    between, or of a controller whose API server did not answer in time."""
    if answer.status_code != 503:
        return True
    try:
        return bool(answer.json().get("may_be_done"))
    except (ValueError, AttributeError):
        return False

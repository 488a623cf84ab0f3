"""The pool as the API sees it, also in processes that lead no cluster: this module loads no client
of Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from pilotlight.errors import Conflict, Unavailable

RETRY_S = 1.0


class NoWarmPod(Conflict):
    """Raised when no warm pod can be claimed; `detail` has `reason`. The caller starts the instance
    in another way."""

    type = "no-warm-pod"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionRequest:
    """An activator's start that wants a warm pod.

    Attributes:
        tenant: its id.
        revision: key, `<function id>@<revision>`.
        attempt: id of the instance to start; the same attempt gets the same pod.
        member: the activator.
        exclude: uids of pods that failed for it.
        claimed_only: only a pod that an earlier request of this attempt claimed, whose answer was
            lost or late; none is claimed now.
    """

    tenant: str
    revision: str
    attempt: str
    member: str
    exclude: tuple[str, ...] = ()
    claimed_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotedPod:
    """A pod that was claimed for a revision. `launch`: the signed launch document for this pod."""

    namespace: str
    name: str
    uid: str
    ip: str
    node: str
    launch: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """Numbers of pods of a shape: `wanted`, and those that are `warm` (ready), `starting`, and
    `promoted`."""

    shape: str
    wanted: int
    warm: int
    starting: int
    promoted: int


class PodClaimer(Protocol):
    """What the leader offers; `claims.PodClaims` implements it."""

    async def promote(self, wanted: PromotionRequest) -> PromotedPod:
        """Claim a warm pod for a revision. Raises NoWarmPod, Unavailable, NotFound, Conflict."""

    async def delete(self, *, namespace: str, name: str, uid: str, reason: str) -> None:
        """Delete a promoted pod. Raises Conflict for any other, Unavailable."""


class WarmPods:
    """The pool of this process. Owner: the controller's event loop.

    Attributes:
        claimer: of the leader; None in a process that does not lead, or without warm pods.
        shapes: the leader's last look at the pool.
        trouble: why pods do not get the size of their functions; "" = they do, as far as is known.
    """

    def __init__(self) -> None:
        self.claimer: PodClaimer | None = None
        self.shapes: tuple[PoolShape, ...] = ()
        self.trouble = ""

    def __repr__(self) -> str:
        return f"<WarmPods {'leads' if self.claimer else 'does not lead'} {self.shapes}>"

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Numbers of pods by shape and state."""
        found = {one.shape: asdict(one) for one in self.shapes}
        return {
            shape: {k: n for k, n in one.items() if k != "shape"} for shape, one in found.items()
        }

    def require_claimer(self) -> PodClaimer:
        """Return the leader's claimer. Raises Unavailable: the controller's Service names the one
        process that works, which leads the cluster moments after it began."""
        if self.claimer is None:
            raise Unavailable(
                "this controller does not lead a cluster with warm pods (yet): ask again",
                retry_after_s=RETRY_S,
            )
        return self.claimer

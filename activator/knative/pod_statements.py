"""Checks what a node agent states about the pod of a connection. Pure.

The agent has proved by its certificate that it is a process of the platform. It is believed about
pods of its own node only, and about pods of the tenant in whose directory the connection was
made."""

from __future__ import annotations

from collections.abc import Callable

from activator.knative.agent_addresses import AgentAddresses
from activator.knative.pod_registry import OwnedPod
from pilotlight.core.transport.pod_calls import Answer, PodAnswer, PodStatement
from pilotlight.kubernetes import names


class PodStatements:
    """The statements that this activator accepts."""

    def __init__(self, owned: Callable[[str], OwnedPod | None], agents: AgentAddresses) -> None:
        """`owned`: the pod that this activator has claimed, by its uid."""
        self._owned = owned
        self._agents = agents

    def instances_in(self, pod: str) -> tuple[str, ...]:
        """Ids of the instances in the pod with this uid."""
        held = self._owned(pod)
        return tuple(held.ports) if held is not None else ()

    def instance_of(self, statement: PodStatement, address: str) -> str | PodAnswer:
        """Return the id of an instance in the pod, or the answer where `address`, the agent's, may
        not speak for it."""
        held = self._owned(statement.pod)
        if held is None:
            return PodAnswer(Answer.NOT_LEASED)
        pod = held.pod
        if pod.labels.get(names.TENANT) != statement.tenant:
            return PodAnswer(
                Answer.REFUSED, f"pod {pod.name} is not of the tenant {statement.tenant}"
            )
        if not self._agents.is_agent_of(address, pod):
            return PodAnswer(
                Answer.UNCONFIRMED,
                f"pod {pod.name} runs on node {pod.node or '(none)'}, and {address} is not an "
                f"address of the node agent there",
            )
        return next(iter(held.ports), held.instance)

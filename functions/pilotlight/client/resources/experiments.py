"""Experiments and feedback, as typed methods of the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.node import NodeResources

FEEDBACK_PATH = "/v1/feedback"
_PATH = "/v1/experiments"


class ExperimentResources(NodeResources):
    """Part of `pilotlight.client.client.Client`, which owns the transport."""

    def feedback(
        self,
        request_id: str,
        *,
        label: str | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Json:
        """Tell the outcome of a call: `{"request_id", "replayed", "waiting"}`.

        `request_id` is the X-Request-Id of its answer, or the id of a submitted call. Each metric,
        and the label, counts once per call: the same again is harmless. Raises NotFound (unknown,
        or not a call of yours), Conflict (told otherwise before, or too late)."""
        body = feedback_body(request_id, label=label, metrics=metrics)
        return dict(
            self._transport.request("POST", FEEDBACK_PATH, json=body, repeatable=True).json()
        )

    def create_experiment(
        self,
        app: str,
        function: str,
        name: str,
        *,
        arms: Sequence[Mapping[str, Any]],
        unit: str = "key",
        percent: float = 100.0,
        guardrails: Sequence[str] | None = None,
        start: bool = False,
    ) -> Json:
        """Plan an experiment; `start` lets units in at once.

        `arms`: `{"name", "revision", "share"}` each, the first one is what the others are compared
        with; shares add up to 100. `unit`: what meets one arm only: `key`, `tenant` or
        `header:<name>`. `guardrails`: such as `"error_ratio +0.02"`, `"latency_p99 +20%"`. Raises
        InvalidInput, NotFound, Conflict."""
        body = {
            "app": app,
            "function": function,
            "name": name,
            "arms": [dict(arm) for arm in arms],
            "unit": unit,
            "percent": percent,
            "start": start,
            **without_none({"guardrails": None if guardrails is None else list(guardrails)}),
        }
        return dict(self._transport.request("POST", _PATH, json=body).json())

    def experiments(self, *, app: str | None = None, function: str | None = None) -> list[Json]:
        """Experiments of the environment, newest first."""
        return self._list(_PATH, "experiments", app=app, function=function)

    def experiment(self, experiment: str) -> Json:
        """One by its id. Raises NotFound."""
        return self._get(_path(experiment))

    def experiment_report(self, experiment: str) -> Json:
        """What it shows by now: `valid` and `problems` first, then `arms`, `comparisons`,
        `sample_ratio`, `guardrails`."""
        return self._get(f"{_path(experiment)}/report")

    def start_experiment(self, experiment: str) -> Json:
        """Let units in. Raises Conflict when it is not a DRAFT, or something else runs on the
        function."""
        return self._steer_experiment(experiment, "start")

    def stop_experiment(
        self, experiment: str, *, reason: str | None = None, arm: str | None = None
    ) -> Json:
        """The kill switch: everybody follows the weights again; with `arm`, its share goes to the
        first arm. Raises Conflict."""
        return self._steer_experiment(
            experiment, "stop", **without_none({"reason": reason, "arm": arm})
        )

    def conclude_experiment(self, experiment: str, arm: str, *, force: bool = False) -> Json:
        """End it: the arm's revision gets all traffic. Raises Conflict for an invalid report,
        unless forced."""
        return self._steer_experiment(experiment, "conclude", arm=arm, force=force)

    def _steer_experiment(self, experiment: str, verb: str, **body: Any) -> Json:
        return dict(
            self._transport.request("POST", f"{_path(experiment)}:{verb}", json=body).json()
        )


def feedback_body(
    request_id: str, *, label: str | None, metrics: Mapping[str, float] | None
) -> Json:
    """What is posted."""
    return {
        "request_id": request_id,
        "metrics": dict(metrics or {}),
        **without_none({"label": label}),
    }


def _path(experiment: str) -> str:
    return f"{_PATH}/{quote(experiment, safe='')}"

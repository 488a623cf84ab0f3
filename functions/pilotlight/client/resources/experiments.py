"""Client methods for experiments and feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment

FEEDBACK_PATH = "/v1/feedback"
_PATH = "/v1/experiments"


class ExperimentResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for experiments and feedback."""

    def feedback(
        self,
        request_id: str,
        *,
        label: str | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Json:
        """Report the outcome of a call; returns `{"request_id", "replayed", "waiting"}`.

        `request_id` is the X-Request-Id of its response, or the id of a background call. Each
        metric, and the label, counts once per call; repeating it is harmless. Raises NotFound
        (unknown, or a call of someone else), Conflict (a different value was reported before, or it
        is too late)."""
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
        """Create an experiment.

        Args:
            arms: `{"name", "revision", "share"}` each; the first is the control, and shares add up
                to 100.
            unit: unit of assignment, which sees only one arm: `key`, `tenant` or `header:<name>`.
            percent: share of units that take part.
            guardrails: such as `"error_ratio +0.02"`, `"latency_p99 +20%"`.
            start: start it immediately.

        Raises InvalidInput, NotFound, Conflict."""
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
        """List the experiments of the environment, newest first."""
        return self._list(_PATH, "experiments", app=app, function=function)

    def experiment(self, experiment: str) -> Json:
        """Return an experiment by its id. Raises NotFound."""
        return self._get(_path(experiment))

    def experiment_report(self, experiment: str) -> Json:
        """Return the current results of an experiment: `valid` and `problems` first, then `arms`,
        `comparisons`, `sample_ratio`, `guardrails`."""
        return self._get(f"{_path(experiment)}/report")

    def start_experiment(self, experiment: str) -> Json:
        """Start assigning units. Raises Conflict if the experiment is not a DRAFT, or if the
        function has another experiment or a rollout."""
        return self._steer_experiment(experiment, "start")

    def stop_experiment(
        self, experiment: str, *, reason: str | None = None, arm: str | None = None
    ) -> Json:
        """Stop an experiment, so that all units follow the traffic weights again; with `arm`, stop
        only that arm and give its share to the control. Raises Conflict."""
        return self._steer_experiment(
            experiment, "stop", **without_none({"reason": reason, "arm": arm})
        )

    def conclude_experiment(self, experiment: str, arm: str, *, force: bool = False) -> Json:
        """End an experiment and give the revision of `arm` all traffic. Raises Conflict for an
        invalid report, unless `force`."""
        return self._steer_experiment(experiment, "conclude", arm=arm, force=force)

    def _steer_experiment(self, experiment: str, verb: str, **body: Any) -> Json:
        return dict(
            self._transport.request("POST", f"{_path(experiment)}:{verb}", json=body).json()
        )


def feedback_body(
    request_id: str, *, label: str | None, metrics: Mapping[str, float] | None
) -> Json:
    """Return the request body of feedback."""
    return {
        "request_id": request_id,
        "metrics": dict(metrics or {}),
        **without_none({"label": label}),
    }


def _path(experiment: str) -> str:
    return f"{_PATH}/{path_segment(experiment)}"

"""Feedback: what became of a call, told by who made it. As frequent as calls are, so it is kept as
data, and not in the audit log."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from pilotlight.controller import feedback
from pilotlight.controller.api.models import Body
from pilotlight.controller.context import ROOM, Ctx, Invoker
from pilotlight.protocol import HEADER_REPLAYED

router = APIRouter(prefix="/v1/feedback", tags=["feedback"])
Number = Annotated[float, Field(strict=True)]


class FeedbackRequest(Body):
    """An outcome of one call: a label, numbers, or both. Each counts once; the same again is
    harmless, another value is refused."""

    request_id: str = Field(
        max_length=256,
        description="X-Request-Id of the call's answer, or the id of a submitted call",
    )
    label: str | None = Field(
        default=None, description="such as `good` or `thumbs-down`: at most 64 characters"
    )
    metrics: dict[str, Number] = Field(
        default={}, max_length=64, description="name → number, such as `rating` or `accuracy`"
    )


class FeedbackAnswer(Body):
    """What became of it. `waiting`: the call's record is on its way, and the feedback is joined to
    it when it comes."""

    request_id: str
    replayed: bool
    waiting: bool


@router.post(
    "",
    dependencies=[ROOM],
    responses={
        202: {"model": FeedbackAnswer, "description": "The call's record is still on its way."}
    },
)
def give_feedback(
    context: Ctx, caller: Invoker, body: FeedbackRequest, response: Response
) -> FeedbackAnswer:
    """Tell the outcome of a call of yours, as late as some weeks after it."""
    told = feedback.parse(body.label, body.metrics)
    days = context.config.settings.feedback_window_days
    with context.store.write() as write:
        given = feedback.give(write, caller, call=body.request_id, feedback=told, window_days=days)
    if given.is_replayed:
        response.headers[HEADER_REPLAYED] = "true"
    response.status_code = 202 if given.is_waiting else 200
    return FeedbackAnswer(
        request_id=body.request_id, replayed=given.is_replayed, waiting=given.is_waiting
    )

"""Routes for feedback: outcomes of calls, reported by the caller. Feedback is as frequent as calls,
so it is stored as data and not in the audit log."""

from __future__ import annotations

from typing import Annotated

from fastapi import Response
from pydantic import Field

from pilotlight.controller.analytics import feedback
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import REQUIRE_DISK_SPACE, Ctx, Invoker
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.protocol import HEADER_REPLAYED

router = APIRouter(prefix="/v1/feedback", tags=["feedback"])
Number = Annotated[float, Field(strict=True)]


class FeedbackRequest(Body):
    """An outcome of one call: a label, numbers, or both. Each counts once: repeating the same value
    has no effect, and a different value is refused."""

    request_id: str = Field(
        max_length=256,
        description="X-Request-Id of the call's response, or the id of a submitted call",
    )
    label: str | None = Field(
        default=None, description="such as `good` or `thumbs-down`: at most 64 characters"
    )
    metrics: dict[str, Number] = Field(
        default={}, max_length=64, description="name → number, such as `rating` or `accuracy`"
    )


class FeedbackAnswer(Body):
    """The result. `waiting`: the call's record has not arrived yet; the feedback is joined to it
    when it does."""

    request_id: str
    replayed: bool
    waiting: bool


@router.post(
    "",
    dependencies=[REQUIRE_DISK_SPACE],
    responses={
        202: {"model": FeedbackAnswer, "description": "The call's record has not arrived yet."}
    },
)
def give_feedback(
    context: Ctx, caller: Invoker, body: FeedbackRequest, response: Response
) -> FeedbackAnswer:
    """Report the outcome of one of your calls, up to some weeks after it."""
    outcome = feedback.parse_feedback(body.label, body.metrics)
    days = context.config.settings.feedback_window_days
    with context.store.write() as write:
        result = feedback.record_feedback(
            write, caller, call=body.request_id, feedback=outcome, window_days=days
        )
    if result.is_replayed:
        response.headers[HEADER_REPLAYED] = "true"
    response.status_code = 202 if result.is_waiting else 200
    return FeedbackAnswer(
        request_id=body.request_id, replayed=result.is_replayed, waiting=result.is_waiting
    )

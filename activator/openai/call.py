"""A call of an engine by its own API."""

from __future__ import annotations

from typing import Any

from activator.call import Call, Reading
from activator.openai.asked import Asked
from activator.openai.reading import reading_of
from activator.targets import Target
from activator.tokens.use import TokenUse
from activator.tracing.context import worker_lines
from activator.upstream import Answer


class EngineCall(Call):
    """See the module.

    Attributes:
        wanted: what its caller asks of the model.
        is_kept: it was submitted, and whoever runs it ends its `tokens`.
    """

    __slots__ = ("affinity", "is_kept", "tokens", "wanted")

    def __init__(self, wanted: Asked, *, tokens: TokenUse | None, affinity: int | None = None, **call: Any) -> None:
        """`call`: as of any Call, but for its body. Raises InvalidInput."""
        super().__init__(body=wanted.written_for(call["target"]), **call)
        self.wanted = wanted
        self.tokens: TokenUse | None = tokens
        self.affinity: int | None = affinity
        self.is_kept = False

    def body_for(self, target: Target) -> bytes:
        """See Call. Raises ModelNotFound, InvalidInput."""
        return self.wanted.written_for(target)

    def reading(self, answer: Answer) -> Reading:
        """See Call."""
        return reading_of(self.wanted, self.tokens, answer, served=self.wanted.adapter or self.target.spec.name)

    def request_head(self, execution_s: float) -> bytes:
        """The request to the engine, up to its body; its log and ours call it by one name."""
        name = self.id.encode()
        return b"".join(
            (
                b"POST ", self.wanted.path.encode(), b" HTTP/1.1\r\nhost: engine\r\nx-request-id: ", name, b"\r\npilotlight-call: ", name,
                b"\r\ncontent-type: ", self.content_type, self.extra_headers, worker_lines(self),
                b"\r\ncontent-length: ", b"%d" % len(self.body), b"\r\n\r\n",
            )
        )  # fmt: skip

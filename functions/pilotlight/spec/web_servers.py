"""Specification of functions that start an HTTP server of their own (`@web_server`).

The record is part of a `FunctionSpec`, and so of its revision. Values out of range raise
InvalidInput naming key, value and bound."""

from __future__ import annotations

from dataclasses import dataclass

from pilotlight.errors import InvalidInput
from pilotlight.spec.engines import MAX_TOKENS
from pilotlight.spec.policies import require_in_range

FIRST_PORT, LAST_PORT = 1024, 65535
"""Bounds of the port: functions do not run as root, which alone may listen below."""
MAX_STARTUP_S = 7 * 86_400.0
MAX_EXAMPLE_CHARS = 1024
MAX_MODELS = 64
MAX_MODEL_CHARS = 256
MODEL_LEN = 131_072
"""Tokens of prompt and answer together, where a server's declaration says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIServerSpec:
    """The language models of a server that speaks OpenAI's API (chat completions, completions,
    embeddings), whose calls are counted in tokens by its own `usage`.

    Attributes:
        models: names that the server knows its models by; the first is that of the function, the
            others are called as `app/function:name`. Empty: one, with the function's name.
        max_model_len: maximum tokens of prompt and answer together: calls beyond are refused, calls
            without a maximum of their own may have that much, and a prompt counts as no more."""

    models: tuple[str, ...] = ()
    max_model_len: int = MODEL_LEN

    def __post_init__(self) -> None:
        require_in_range("max_model_len", self.max_model_len, 1, MAX_TOKENS)
        if len(self.models) > MAX_MODELS:
            raise InvalidInput(
                f"model: {len(self.models)} names, at most {MAX_MODELS}", parameter="model"
            )
        for name in self.models:
            if not 0 < len(name) <= MAX_MODEL_CHARS or not name.isprintable():
                raise InvalidInput(
                    f"model = {name[:80]!r}: must be the name that the server knows its model by, "
                    f"of 1 to {MAX_MODEL_CHARS} printable characters",
                    parameter="model",
                )
        if len(set(self.models)) < len(self.models):
            raise InvalidInput("model: two names are equal: remove one", parameter="model")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebServerSpec:
    """A server that the function starts when it is called, once, before the snapshot.

    Attributes:
        port: the TCP port at which it listens, on the loopback interface of its instance.
        startup_s: time from the call of the function until the server answers.
        example: path that it answers with a status below 500 once it is ready, and with the same
            status after a restore; None: it is ready when it answers GET / with any status.
        openai: the language models that it serves by OpenAI's API; None: it is any web server."""

    port: int
    startup_s: float = 5.0
    example: str | None = None
    openai: OpenAIServerSpec | None = None

    def __post_init__(self) -> None:
        if not FIRST_PORT <= self.port <= LAST_PORT:
            raise InvalidInput(
                f"web_server: port = {self.port}: must be {FIRST_PORT} to {LAST_PORT} (lower ones "
                f"need root, which functions are not): let the server listen at one of these",
                parameter="port",
            )
        if not 0 < self.startup_s <= MAX_STARTUP_S:
            raise InvalidInput(
                f"web_server: startup_timeout = {self.startup_s:g}: must be more than 0 s and at "
                f"most 7 days",
                parameter="startup_timeout",
            )
        if self.example is not None and not _is_path(self.example):
            raise InvalidInput(
                f"web_server: example = {self.example[:80]!r}: must be a path of the server in "
                f"printable ASCII, such as '/health', of at most {MAX_EXAMPLE_CHARS} characters",
                parameter="example",
            )


def _is_path(text: str) -> bool:
    """Whether it can be the target of a request line."""
    is_plain = text.isascii() and text.isprintable() and " " not in text
    return text.startswith("/") and is_plain and len(text) <= MAX_EXAMPLE_CHARS

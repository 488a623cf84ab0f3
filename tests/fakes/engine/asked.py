"""What a request to the fake engine asks for, in vLLM's words, and how it is refused."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from tests.fakes.engine.engine import EngineFake, Prompt


class Refused(Exception):
    """Raised for a request that the engine does not take: 400 or 404 in vLLM's shape."""

    def __init__(
        self,
        message: str,
        *,
        parameter: str | None = None,
        status: int = 400,
        kind: str = "BadRequestError",
    ) -> None:
        super().__init__(message)
        self.body = {
            "error": {"message": message, "type": kind, "param": parameter, "code": status}
        }
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, understood."""

    id: str
    chat: bool
    prompt: Prompt
    count: int
    stream: bool
    usage: bool
    usage_always: bool
    token_ids: bool
    tool: str | None
    document: bool

    @property
    def object(self) -> str:
        """How a whole answer calls itself."""
        return "chat.completion" if self.chat else "text_completion"


def understand(engine: EngineFake, body: dict[str, Any], request: Request, *, chat: bool) -> Asked:
    options = body.get("stream_options") or {}
    identity = request.headers.get("x-request-id") or uuid.uuid4().hex
    tool = _tool(body)
    return Asked(
        id=f"{'chatcmpl' if chat else 'cmpl'}-{identity}",
        chat=chat,
        prompt=_prompt(engine, body, chat=chat),
        count=int(body.get("n") or 1),
        stream=bool(body.get("stream")),
        usage=bool(options.get("include_usage")),
        usage_always=bool(options.get("continuous_usage_stats")),
        token_ids=bool(body.get("return_token_ids")),
        tool=tool,
        document=_wants_document(body),
    )


def _prompt(engine: EngineFake, body: dict[str, Any], *, chat: bool) -> Prompt:
    model, longest = known_model(engine, body), engine.max_model_len
    text, tokens = prompt_tokens(engine, body, chat=chat)
    if len(tokens) >= longest:
        raise Refused(
            f"This model's maximum context length is {longest} tokens. However, your prompt "
            f"contains at least {longest + 1} input tokens,"
            " which exceeds this limit even without any output tokens. Please reduce the length "
            "of the input prompt."
            f" (parameter=input_tokens, value={longest + 1})",
            parameter="input_tokens",
        )
    wanted = _max_tokens(body, default=longest - len(tokens) if chat else 16)
    if wanted > longest - len(tokens):
        raise Refused(
            f"max_tokens={wanted} cannot be greater than max_model_len={longest}. Please request "
            f"fewer output tokens."
            f" (parameter=max_tokens, value={wanted})",
            parameter="max_tokens",
        )
    return Prompt(
        model=model,
        text=text,
        tokens=tokens,
        max_tokens=wanted,
        ignore_eos=bool(body.get("ignore_eos")),
    )


def known_model(engine: EngineFake, body: dict[str, Any]) -> str:
    model = str(body.get("model") or engine.model)
    if model not in engine.names():
        aliases = ", ".join(engine.names())
        message = f"The model `{model}` does not exist. Valid aliases: {aliases}."
        raise Refused(message, parameter="model", status=404, kind="NotFoundError")
    return model


def prompt_tokens(
    engine: EngineFake, body: dict[str, Any], *, chat: bool
) -> tuple[str, tuple[int, ...]]:
    if chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refused(
                "1 validation error:\n  Input should be a valid list",
                parameter="body.messages",
                kind="Bad Request",
            )
        said = "".join(f"<{m.get('role')}>{_content(m)}" for m in messages)
        return said, tuple(engine.tokenizer.encode(said))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(t, int) for t in prompt):
        return engine.tokenizer.decode(prompt), tuple(prompt)
    text: Any = prompt[0] if isinstance(prompt, list) and prompt else prompt
    if not isinstance(text, str):
        raise Refused(
            "Either prompt or prompt_embeds must be provided and non-empty.", parameter="prompt"
        )
    return text, tuple(engine.tokenizer.encode(text))


async def read_body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except ValueError as e:
        raise Refused(
            f"1 validation error:\n  JSON decode error: {e}", parameter="body", kind="Bad Request"
        ) from e
    if not isinstance(body, dict):
        raise Refused(
            "1 validation error:\n  Input should be a valid dictionary",
            parameter="body",
            kind="Bad Request",
        )
    return body


def _max_tokens(body: dict[str, Any], *, default: int) -> int:
    wanted = body.get("max_completion_tokens", body.get("max_tokens"))
    if wanted is None:
        return default
    if not isinstance(wanted, int) or wanted < 1:
        message = (
            f"max_tokens must be at least 1, got {wanted}. (parameter=max_tokens, value={wanted})"
        )
        raise Refused(message, parameter="max_tokens")
    return wanted


def _content(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content or "")


def _tool(body: dict[str, Any]) -> str | None:
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if choice in (None, "none", "auto") or not tools:
        return None
    return (
        str(choice["function"]["name"])
        if isinstance(choice, dict)
        else str(tools[0]["function"]["name"])
    )


def _wants_document(body: dict[str, Any]) -> bool:
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_schema" and not isinstance(
        (wanted.get("json_schema") or {}).get("schema"), dict
    ):
        raise Refused(
            "response_format json_schema must have a schema that is an object",
            parameter="response_format",
        )
    return wanted.get("type") in ("json_object", "json_schema")

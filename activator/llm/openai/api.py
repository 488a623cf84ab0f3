"""The OpenAI-compatible API, from request to answer: read → resolve the model → count → admit →
reserve → forward → meter.

`/v1/chat/completions`, `/v1/completions`, `/v1/embeddings` and `/v1/models`, of the caller's own
tenant or under `/t/{tenant}`; and the same paths behind `/fn/{app}/{function}`, where the model is
that function unless one of its adapters is named. Between reading the body and returning the answer
a request is treated like every call: the same quotas, choice of a revision, retries, fallbacks and
billing."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from activator.access.grants import AccessGrant
from activator.access.resolver import RequestResolver
from activator.calls.call import AnsweredCall, Call
from activator.calls.runner import CallRunner
from activator.http.request import Request, accept_of, subpath, too_large
from activator.llm.openai import errors as shapes
from activator.llm.openai.call import EngineCall, adapter_of, wrapped
from activator.llm.openai.model_resolver import Models, listed, served_by
from activator.llm.openai.parser import uncounted
from activator.llm.openai.request import PATHS, TASKS, OpenAIRequest, parsed
from activator.llm.openai.responses import OpenAIFormat
from activator.llm.prefix_affinity import key_of
from activator.llm.request_size import CHAT, COMPLETIONS, EMBEDDINGS, write_cap
from activator.llm.token_admission import TokenAdmission
from activator.quotas.admission import UNCOUNTED, admit, counted
from activator.quotas.token_reservation import TokenReservation
from activator.response_cache.cached_calls import CachedCalls
from activator.routing.api_keys import Principal
from activator.settings import ActivatorSettings
from activator.tracing.tracer import Tracer
from pilotlight import errors
from pilotlight.protocol import CONTENT_JSON
from pilotlight.validation.json_size import require_few_values

MODELS = "/v1/models"
OURS = frozenset({CHAT, COMPLETIONS, EMBEDDINGS, MODELS})
"""Paths of this API whose requests name their model."""
TO_LOOK_AT = frozenset({"/health", "/version", "/metrics"})
"""Paths of an engine that may be read behind `/fn/`."""
MAX_VALUES = 100_000
"""Maximum number of JSON values of a body (`json_size`): a hundred thousand token ids, ten thousand
messages, at most 20 milliseconds of the event loop."""
_JSON = CONTENT_JSON.encode()
SendResponse = Callable[
    [Request, Call, Coroutine[Any, Any, AnsweredCall], OpenAIFormat], Awaitable[None]
]
"""Sends the result of a call to its caller, and ends the attempt."""


def is_openai_path(path: str) -> bool:
    """Whether a path belongs to this API. Paths below `/v1/models/` belong to `open_inference.api`
    as well, which is checked second."""
    return path in OURS


def is_one_model(request: Request, path: str) -> bool:
    """Whether a request below `/v1/models/` is for a model's entry, and not for its versions or
    other resources of model servers."""
    return request.verb == "GET" and path.startswith(f"{MODELS}/") and "/versions/" not in path


class OpenAI:
    """Handles this API's requests. Owner: the event loop."""

    def __init__(
        self,
        *,
        settings: ActivatorSettings,
        resolver: RequestResolver,
        runner: CallRunner,
        forward_raw: Callable[[Request, AccessGrant], Awaitable[None]],
        send: SendResponse,
        tracer: Tracer,
        cached: CachedCalls,
    ) -> None:
        """`send`: sends the result of a call to the caller, in a format. `forward_raw`: passes a
        request on to the engine as it is. `cached`: runs calls of functions with a response
        cache."""
        self._settings = settings
        self._resolver = resolver
        self._runner = runner
        self._forward_raw = forward_raw
        self._token_admission = TokenAdmission(
            waiting_of=lambda target: runner.throttler_of(target).waiting
        )
        self._tracer = tracer
        self._cached = cached
        self._models = Models(table=resolver.table, resolver=resolver)
        self._send = send

    def __repr__(self) -> str:
        return f"<OpenAI {self._models!r}>"

    # -- entry points ------------------------------------------------------------------------------
    async def answer(self, request: Request, owner: str | None, place: str) -> None:
        """Answer a request whose path `is_openai_path`. Raises what calls raise; errors have
        OpenAI's format."""
        request.shape = shapes.shape
        if place == MODELS:
            await self._list(request, owner)
            return
        request.require_method("POST")
        caller = self._caller(request, owner)
        if caller.is_anonymous and not self._models.visible(request, caller, owner):
            raise self._resolver.stranger(
                request
            )  # do not read the body of an unauthenticated request without a target
        quota_check, body_bytes = self._resolver.before(request, caller)
        request.rate_limits = quota_check
        async with counted(quota_check):
            data = await self._read(request, body_bytes)
            asked = OpenAIRequest(place, parsed(data))
            found = self._models.find(request, caller, owner, asked.model)
            try:
                entry = self._resolver.enter(request, caller, found.routed, found.asked)
            except errors.NotFound as e:  # no such revision
                raise shapes.ModelNotFound(str(e), parameter="model") from e
            if len(data) > entry.body_bytes:
                raise too_large(entry.body_bytes)
            asked.adapter = found.adapter
            asked.check(entry.target)
        await self._call(request, entry, asked)

    def _caller(self, request: Request, owner: str | None) -> Principal:
        """Identify the caller. Raises Unauthenticated, or Forbidden for a key that may not call."""
        caller = self._resolver.identify(request, owner)
        caller.check_may_call()
        return caller

    async def _read(self, request: Request, limit_bytes: int) -> bytes:
        """Read the body. The time of the upload is the caller's own and excluded from our
        clocks."""
        _require_json(request)
        asked_ns = time.monotonic_ns()
        data = await request.body(limit_bytes=limit_bytes, timeout_s=self._settings.body_timeout_s)
        upload_ns = time.monotonic_ns() - asked_ns
        request.began_ns += upload_ns
        request.routed_ns += upload_ns
        require_few_values(
            data, MAX_VALUES, "send less in one request, or text in place of token ids"
        )
        return data

    async def _read_admitted(
        self,
        request: Request,
        entry: AccessGrant,
        made: Callable[[bytes], OpenAIRequest],
        *,
        holds: int = 1,
    ) -> OpenAIRequest:
        """Read the body and convert it with `made`, within the request quotas. Tokens are counted
        later, once their number is known."""
        async with counted(entry.quota_check, holds=holds):
            asked = made(await self._read(request, entry.body_bytes))
            asked.check(entry.target)
            return asked

    async def answer_raw(self, request: Request, entry: AccessGrant) -> None:
        """Handle `/fn/{app}/{function}/…` of a language model. Of an engine's paths only the listed
        ones exist; of a web server's, others have their own answers and errors, and count no
        tokens (`require_uncounted`)."""
        path = subpath(request.scope).partition(b"?")[0].decode("latin-1")
        is_engine = entry.target.spec.engine is not None
        if is_engine or path in OURS:
            request.shape = shapes.shape
        if request.verb == "POST" and path in (PATHS if is_engine else TASKS):

            def made(data: bytes) -> OpenAIRequest:
                asked = OpenAIRequest(path, parsed(data))
                asked.adapter = adapter_of(asked.model, entry.target)
                return asked

            await self._call(request, entry, await self._read_admitted(request, entry, made))
        elif request.verb == "GET" and path == MODELS:
            request.target = None  # not a call
            await _respond_list(request, served_by(entry.target))
        elif (
            request.verb == "GET"
            and path in TO_LOOK_AT
            and (path != "/metrics" or _is_owner(entry))
        ):
            await self._forward_raw(request, entry)
        elif not is_engine:
            require_uncounted(entry, f"{request.verb} {path[:200]}")
            await self._forward_raw(request, entry)
        else:
            raise errors.NotFound(
                f"{request.verb} {path[:200]} does not exist: an engine is called at "
                f"{', '.join(sorted(PATHS))}"
            )

    async def describe(self, request: Request, owner: str | None, model: str) -> bool:
        """Handle `GET /v1/models/{model}` if that is an engine; returns whether it was answered.
        Raises ModelNotFound if the name is not a function's."""
        caller = self._caller(request, owner)
        found = self._models.described(request, caller, owner, model)
        if found is not None:
            await request.respond_json(200, found)
        elif "/" not in model:
            request.shape = shapes.shape
            raise self._models.unknown(request, caller, owner, model)
        return found is not None

    # -- models ------------------------------------------------------------------------------------
    async def _list(self, request: Request, owner: str | None) -> None:
        request.require_method("GET")
        caller = self._caller(request, owner)
        await _respond_list(
            request,
            [
                one
                for engine in self._models.visible(request, caller, owner)
                for one in listed(engine)
            ],
        )

    # -- calls by function name --------------------------------------------------------------------
    async def invoke(self, request: Request, entry: AccessGrant) -> None:
        """Handle `POST …:invoke` of an engine with `{"path", "body"}`: the same call by the
        function's own name. Raises what calls raise."""
        await self._call(
            request,
            entry,
            await self._read_admitted(request, entry, lambda data: wrapped(data, entry.target)),
        )

    async def admit_later(self, request: Request, entry: AccessGrant) -> EngineCall:
        """Admit a call to run later. It counts as a request now, and as a concurrent call when it
        runs."""

        def made(data: bytes) -> OpenAIRequest:
            asked = wrapped(data, entry.target)
            asked.said = data
            if not asked.counts:
                raise errors.InvalidInput(
                    f"path = {asked.path}: only these can be submitted: {', '.join(TASKS)}",
                    parameter="path",
                )
            return asked

        asked = await self._read_admitted(request, entry, made, holds=0)
        use = await self._enter(request, entry, asked, holds=0)
        try:
            return self.call_of(request, entry, asked, use)
        except BaseException:
            use.settle()
            raise

    async def admit_line(self, entry: AccessGrant, call: EngineCall) -> None:
        """Admit the call of a batch's line, whose body is loaded, as `admit_later` admits others.
        Raises InvalidInput, OverQuota, Unavailable."""
        wanted = call.wanted
        use = await self._token_admission.admit(
            entry, wanted.path, wanted.body, began_ns=time.monotonic_ns(), holds=0
        )
        call.tokens, call.admission = use, use.admission
        call.caller = replace(call.caller, rank=use.rank(call.caller.rank))

    # -- calls -------------------------------------------------------------------------------------
    async def _call(self, request: Request, entry: AccessGrant, asked: OpenAIRequest) -> None:
        """Run a validated request."""
        if not asked.counts:
            await self._call_uncounted(request, entry, asked)
            return
        use = await self._enter(request, entry, asked)
        try:
            call = self.call_of(request, entry, asked, use)
            terms = call.target.cache
            step = (
                self._runner.begin(call)
                if terms is None
                else self._cached.begin(call, terms, request.headers)
            )
            await self._send(request, call, step, OpenAIFormat(asked, use))
        finally:
            use.settle()

    async def _enter(
        self, request: Request, entry: AccessGrant, asked: OpenAIRequest, *, holds: int = 1
    ) -> TokenReservation:
        """Admit a request. An invalid one counts as a request as well."""
        try:
            return await self._token_admission.admit(
                entry, asked.path, asked.body, began_ns=request.began_ns, holds=holds
            )
        except errors.InvalidInput:
            await admit(entry.quota_check, holds=0)
            raise

    async def _call_uncounted(
        self, request: Request, entry: AccessGrant, asked: OpenAIRequest
    ) -> None:
        """Run a request that does not use the model, such as tokenization: only its time is
        billed."""
        with await entry.admit() as admission:
            call = self.call_of(request, entry, asked, None)
            call.admission = admission
            form = OpenAIFormat(asked, uncounted(request.began_ns))
            await self._send(request, call, self._runner.begin(call), form)

    def call_of(
        self,
        request: Request,
        entry: AccessGrant,
        asked: OpenAIRequest,
        use: TokenReservation | None,
    ) -> EngineCall:
        """Create the engine call of a request. Raises InvalidInput."""
        caller = entry.caller_of(request.headers, request.origin)
        if not _is_owner(entry):
            asked.salt = _salt_of(entry)
        if use is not None:
            is_engine = entry.target.spec.engine is not None
            write_cap(asked.path, asked.body, use.cap, is_engine=is_engine)
            caller = replace(caller, rank=use.rank(caller.rank))
        call = EngineCall(
            asked,
            tokens=use,
            affinity=key_of(asked.body, asked.adapter + asked.salt),
            id=request.id,
            target=entry.target,
            method="",
            accept=accept_of(request.headers),
            caller=caller,
            admission=use.admission if use is not None else UNCOUNTED,
            choice=request.choice,
            deadline_s=request.deadline_s(),
        )
        call.began_ns, call.routed_ns = request.began_ns, request.routed_ns
        self._tracer.begin(call, request.headers)
        request.on_failed = partial(self._tracer.failed, call)
        return call


def require_uncounted(entry: AccessGrant, what: str) -> None:
    """Raise NotFound unless a caller may use a path of a language model on which no tokens are
    counted, and nothing is guarded: its own tenant's may, where no limit or quota counts them, and
    there is no guard. `what`: the request's verb and path.

    Other tenants are shown what they are of an engine: what its server says of itself may have
    prompts of others."""
    counted_at = f"tokens are counted at {', '.join(sorted(TASKS))}"
    if entry.target.guard:
        raise errors.NotFound(
            f"{what} passes no guard, which this model has: call it at {', '.join(sorted(TASKS))}"
        )
    if not _is_owner(entry):
        raise errors.NotFound(f"{what} is for the tenant of this function only: {counted_at}")
    if entry.token_bound is not None or entry.target.spec.limits is not None:
        by = "limits=" if entry.token_bound is None else "tokens_per_min"
        raise errors.NotFound(
            f"{what} counts no tokens, which {by} limits for this call: {counted_at}"
        )


def _is_owner(entry: AccessGrant) -> bool:
    return entry.caller.tenant == entry.target.tenant


def _salt_of(entry: AccessGrant) -> str:
    """A cache salt per tenant for a shared function: without it, a faster answer would reveal that
    another tenant sent the same prompt."""
    whose = entry.caller.tenant or "-"
    return hashlib.sha256(f"{entry.target.tenant}\0{whose}".encode()).hexdigest()[:32]


def _require_json(request: Request) -> None:
    given = request.headers.get(b"content-type", _JSON).partition(b";")[0].strip().lower()
    if given != _JSON:
        shown = given[:80].decode("latin-1")
        raise errors.InvalidInput(
            f"content-type {shown!r} is not supported: send application/json",
            parameter="content-type",
        )


async def _respond_list(request: Request, models: list[dict[str, Any]]) -> None:
    await request.respond_json(200, {"object": "list", "data": models})

"""Decorators that mark functions and classes: `enter, exit, method, concurrent, batched`, and of web
applications `asgi_app, wsgi_app, fastapi_endpoint, web_server`.

`decorator_metadata` says what a mark is."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from pilotlight.errors import InvalidInput
from pilotlight.sdk.cls import MarkedMethod
from pilotlight.sdk.decorator_metadata import (
    describe_target,
    metadata_of,
    method_metadata,
    refuse_bare,
    set_metadata,
    undecorated,
    warn_ignored,
)
from pilotlight.sdk.function import Function
from pilotlight.sdk.unsupported import is_unsupported, not_supported
from pilotlight.spec.engines import TokenLimits
from pilotlight.spec.policies import BatchPolicy
from pilotlight.spec.web_servers import MODEL_LEN, OpenAIServerSpec, WebServerSpec

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


def _function(decorator: str, target: Any) -> Any:
    if hasattr(target, "__pilotlight__"):
        raise InvalidInput(
            f"@{decorator} must be placed below @app.function() or @app.cls(), closer to the "
            f"definition of {target!r}"
        )
    target = undecorated(target)
    if not inspect.isfunction(target):
        raise InvalidInput(
            f"@{decorator} decorates functions and methods; {describe_target(target)} is a "
            f"{type(target).__name__}"
        )
    return target


def enter(
    func: None = None, /, *, snap: bool = True, timeout_s: float | None = None
) -> Callable[[F], F]:
    """Run this method when an instance starts, before it receives calls.

    Args:
        snap: True (the default): run once, before the snapshot; for imports, model loading and
            warm-up. False: run after every fork or restore; for connections, credentials and
            everything else that instances must not share.
        timeout_s: time limit of the method. None: before the snapshot, the rest of the startup
            timeout; after it, 10 s (with `snapshot=False`, the startup timeout). A method that
            exceeds its limit fails the start with an error that names it."""
    refuse_bare("pilotlight.enter", func)
    options = {"snap": bool(snap), **_limit("pilotlight.enter", timeout_s)}

    def mark(method: F) -> F:
        set_metadata(_function("pilotlight.enter", method), "enter", options)
        return method

    return mark


def exit(func: None = None, /, *, timeout_s: float | None = None) -> Callable[[F], F]:  # noqa: A001 - the word that users know
    """Run this method when an instance shuts down gracefully.

    It may run for `timeout_s` (None: 10 s), but not beyond the grace period of the shutdown. It
    does not run when an instance is killed or crashes."""
    refuse_bare("pilotlight.exit", func)
    options = _limit("pilotlight.exit", timeout_s) or True

    def mark(method: F) -> F:
        set_metadata(_function("pilotlight.exit", method), "exit", options)
        return method

    return mark


def _limit(decorator: str, timeout_s: float | None) -> dict[str, float]:
    if timeout_s is None:
        return {}
    if (
        isinstance(timeout_s, bool)
        or not isinstance(timeout_s, int | float)
        or not 0 < timeout_s <= 7 * 86_400
    ):
        raise InvalidInput(
            f"@{decorator}(timeout_s={timeout_s!r}): must be more than 0 s and at most 7 days",
            parameter="timeout_s",
        )
    return {"timeout_s": float(timeout_s)}


def method(
    func: None = None,
    /,
    *,
    example: Any = None,
    check: Callable[[Any, Any], bool] | None = None,
    is_generator: bool | None = None,
) -> Callable[[Callable[Concatenate[Any, P], R]], Function[P, R]]:
    """Make this method of an `@app.cls()` class remotely callable: `Class().name.remote(…)`.

    Type checkers see a `Function`, because they do not follow class decorators; at run time the
    method remains a plain function.

    Args:
        example: JSON arguments of an example call, as a list (by position) or a dict (by name). It
            warms up each instance and verifies snapshots.
        check: `check(answer, expected) -> bool` compares the answers to the example where equality
            is too strict.
        is_generator: ignored; detected from the method."""
    refuse_bare("pilotlight.method", func)
    if is_generator is not None:
        warn_ignored("is_generator", "it is detected from the function")
    options = method_metadata(example=example, check=check)

    def mark(method: Callable[Concatenate[Any, P], R]) -> Function[P, R]:
        set_metadata(_function("pilotlight.method", method), "method", options)
        return cast("Function[P, R]", MarkedMethod(method))

    return mark


def concurrent(
    func: None = None, /, *, max_inputs: int, target_inputs: int | None = None
) -> Callable[[T], T]:
    """Let one instance process up to `max_inputs` calls concurrently.

    The autoscaler aims at `target_inputs` calls per instance (None: `max_inputs`). Place the
    decorator on a class or function, below `@app.cls()` or `@app.function()`."""
    refuse_bare("pilotlight.concurrent", func)

    def mark(target: T) -> T:
        if not inspect.isclass(target):
            _function("pilotlight.concurrent", target)
        set_metadata(
            target, "concurrent", {"max_inputs": max_inputs, "target_inputs": target_inputs}
        )
        return target

    return mark


class BatchedDecorator(Protocol):
    """The type of `@batched(…)`: a body that takes lists becomes callable with single values."""

    @overload
    def __call__(
        self, body: Callable[P, Coroutine[Any, Any, Sequence[R]]], /
    ) -> Callable[..., Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, body: Callable[P, Sequence[R]], /) -> Callable[..., R]: ...
    @overload
    def __call__(self, body: Callable[P, Any], /) -> Callable[..., Any]: ...


def batched(
    func: None = None,
    /,
    *,
    max_batch_size: int,
    wait_ms: float,
    buckets: Sequence[int] = (),
    adaptive: bool = True,
    retry_alone: bool = True,
) -> BatchedDecorator:
    """Combine single calls into batches (dynamic batching).

    Each caller passes one value per parameter and gets one result. The body receives a list per
    parameter and returns a list of results in the same order; an exception in the list fails only
    the call in its position. Place the decorator on a function below `@app.function()`, or on a
    method (with or without `@method()`).

    Args:
        max_batch_size: maximum number of calls in one batch.
        wait_ms: how long the first call of a batch waits for others at most, when it could run.
        buckets: ascending length limits, such as (64, 256). Only calls of the same bucket share a
            batch. The length of a call is that of its first argument, if it has one.
        adaptive: wait only if, by the measured cost of batches, waiting pays off. False: always
            wait up to `wait_ms`.
        retry_alone: when the body raises, retry each call of the batch once, alone. False: every
            call of the batch fails with the error."""
    refuse_bare("pilotlight.batched", func)
    try:
        policy = BatchPolicy(
            max_batch_size=max_batch_size,
            wait_ms=float(wait_ms),
            buckets=tuple(buckets),
            adaptive=adaptive,
            retry_alone=retry_alone,
        )
    except (TypeError, ValueError) as e:
        raise InvalidInput(
            f"batched: max_batch_size, wait_ms and buckets must be numbers: {e}"
        ) from e
    options = {**dataclasses.asdict(policy), "buckets": list(policy.buckets)}

    def mark(method: Any) -> Any:
        set_metadata(_function("pilotlight.batched", method), "batched", options)
        return method

    return cast("BatchedDecorator", mark)


def asgi_app(
    func: None = None, /, *, example: str | None = None, **modal_options: Any
) -> Callable[[F], F]:
    """Serve the ASGI application (FastAPI, Starlette, …) that this function returns, under
    `/fn/{app}/{function}/`.

    `example` is a path of the application, such as "/health". With it, the application is created
    and the path requested before the snapshot, which makes starts faster; the application must then
    work without secrets and answer the path before its lifespan startup. None: the application is
    created at every start.

    `modal_options`: `requires_proxy_auth=True` has the effect that every function has without
    `access="public"`; others of Modal's raise NotSupported."""
    return _web("asgi_app", func, example, modal_options, {})


def wsgi_app(
    func: None = None, /, *, example: str | None = None, **modal_options: Any
) -> Callable[[F], F]:
    """Serve the WSGI application (Flask, Django, …) that this function returns, as `asgi_app` does.

    Its calls run in threads. An environment that has a2wsgi is served by it."""
    return _web("wsgi_app", func, example, modal_options, {"wsgi": True})


def fastapi_endpoint(
    func: None = None,
    /,
    *,
    method: str = "GET",
    docs: bool = False,
    example: str | None = None,
    **modal_options: Any,
) -> Callable[[F], F]:
    """Serve this function at `/fn/{app}/{function}/`: its parameters are read from the query and
    the body, and its result is answered, as FastAPI does. FastAPI must be in its environment.

    Args:
        method: HTTP method, such as "POST".
        docs: serve FastAPI's interactive documentation at `docs` below the address.
        example, modal_options: as for `asgi_app`; the path of the endpoint itself is "/"."""
    if isinstance(func, str):
        raise InvalidInput(
            f"@pilotlight.fastapi_endpoint({func!r}): write method={func!r}", parameter="method"
        )
    if not isinstance(method, str) or method.upper() not in _METHODS:
        raise InvalidInput(
            f"@pilotlight.fastapi_endpoint(method={method!r}): must be one of {', '.join(_METHODS)}",
            parameter="method",
        )
    endpoint = {"endpoint": {"method": method.upper(), "docs": bool(docs)}}
    return _web("fastapi_endpoint", func, example, modal_options, endpoint)


def web_server(
    port: int,
    *,
    startup_timeout: float = 5.0,
    example: str | None = None,
    openai: bool = False,
    model: str | Sequence[str] | None = None,
    max_model_len: int | None = None,
    limits: TokenLimits | None = None,
    **modal_options: Any,
) -> Callable[[F], F]:
    """Serve the HTTP server that this function starts, under `/fn/{app}/{function}/`.

    The function runs once, before the snapshot. It starts the server with `subprocess.Popen(…)`,
    or in a thread, and returns; the snapshot contains the server and all its processes.

    Args:
        port: where the server listens: at 127.0.0.1, ::1 or all addresses, 1024 to 65535.
        startup_timeout: seconds from the call of the function until the server answers.
        example: a path of the server, such as "/health": it is ready, and may be snapshotted, when
            it answers this path with a status below 500. None: when it answers "/" with any
            status.
        openai: it speaks OpenAI's API (llama.cpp, SGLang, vLLM, TEI, LiteLLM, …): the function is a
            language model, called at `/v1/chat/completions`, `/v1/completions` and
            `/v1/embeddings` as `app/function`, and its tokens are those of the server's `usage`.
        model: with `openai`: the name that the server knows its model by, or several: the first is
            the function's, the others are called as `app/function:name`. None: the function's own
            name.
        max_model_len: with `openai`: tokens of prompt and answer together; None: 131,072.
        limits: with `openai`: `pilotlight.TokenLimits(…)`.
        modal_options: as for `asgi_app`."""
    if isinstance(port, bool) or not isinstance(port, int):
        given = describe_target(port) if callable(port) else repr(port)
        raise InvalidInput(
            f"@pilotlight.web_server({given}): the first argument must be the port, such as "
            f"@pilotlight.web_server(8000)",
            parameter="port",
        )
    if isinstance(startup_timeout, bool) or not isinstance(startup_timeout, int | float):
        raise InvalidInput(
            f"@pilotlight.web_server(startup_timeout={startup_timeout!r}): must be a number of "
            f"seconds",
            parameter="startup_timeout",
        )
    server = WebServerSpec(
        port=port,
        startup_s=float(startup_timeout),
        example=example,
        openai=_openai_of(openai, model=model, max_model_len=max_model_len, limits=limits),
    )
    details = {"web_server": server, "limits": limits}
    mark = _web("web_server", None, example, modal_options, details)

    def put(function: F) -> F:
        _check_starts_server(undecorated(function))
        return mark(function)

    return put


def _openai_of(
    openai: Any, *, model: Any, max_model_len: Any, limits: Any
) -> OpenAIServerSpec | None:
    """The models of a web server. Raises InvalidInput naming the option."""
    if not isinstance(openai, bool):
        raise InvalidInput(
            f"@pilotlight.web_server(openai={openai!r}): must be True or False", parameter="openai"
        )
    options = {"model": model, "max_model_len": max_model_len, "limits": limits}
    given = [name for name, value in options.items() if value is not None]
    if given and not openai:
        raise InvalidInput(
            f"@pilotlight.web_server({given[0]}=…): only for a server that speaks OpenAI's API: "
            f"add openai=True",
            parameter=given[0],
        )
    if not openai:
        return None
    names = () if model is None else (model,) if isinstance(model, str) else model
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(
            f"@pilotlight.web_server(model={model!r}): must be a name, or a list of names",
            parameter="model",
        )
    length = MODEL_LEN if max_model_len is None else max_model_len
    if isinstance(length, bool) or not isinstance(length, int):
        raise InvalidInput(
            f"@pilotlight.web_server(max_model_len={max_model_len!r}): must be a number of tokens",
            parameter="max_model_len",
        )
    if limits is not None and not isinstance(limits, TokenLimits):
        raise InvalidInput(
            f"@pilotlight.web_server(limits={limits!r}): expected pilotlight.TokenLimits(…)",
            parameter="limits",
        )
    return OpenAIServerSpec(models=tuple(names), max_model_len=length)


def _check_starts_server(function: Any) -> None:
    """Raise InvalidInput unless a function can be called to start a server."""
    if not inspect.isfunction(function):
        return  # which the mark refuses
    what = f"{describe_target(function)} is a @pilotlight.web_server()"
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise InvalidInput(
            f"{what} but a coroutine or a generator: write it with def, let it start the server "
            f"with subprocess.Popen(…), and return"
        )
    if "batched" in metadata_of(function):
        raise InvalidInput(f"{what} and @batched: only calls can be batched, remove one of them")
    parameters = list(inspect.signature(function).parameters.values())
    own = parameters[1:] if "." in function.__qualname__.rpartition("<locals>.")[2] else parameters
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if needed := [p.name for p in own if p.default is p.empty and p.kind not in variable]:
        raise InvalidInput(
            f"{what} but takes {needed[0]}: nothing passes it an argument, requests go to the "
            f"server that it starts",
            parameter=needed[0],
        )


web_endpoint = fastapi_endpoint
"""The former name of `fastapi_endpoint` in Modal."""


def _web(
    decorator: str,
    func: Any,
    example: str | None,
    modal_options: Mapping[str, Any],
    details: Mapping[str, Any],
) -> Callable[[F], F]:
    """Return the mark of a web application. Raises InvalidInput, NotSupported."""
    name = f"pilotlight.{decorator}"
    refuse_bare(name, func)
    if example is not None and (not isinstance(example, str) or not example.startswith("/")):
        raise InvalidInput(
            f"@{name}(example={example!r}): must be a path of the application, such as '/'",
            parameter="example",
        )
    for option, value in modal_options.items():
        if option == "requires_proxy_auth" and value:
            continue  # as every function without access="public"
        if option == "requires_proxy_auth":
            raise InvalidInput(
                f"@{name}(requires_proxy_auth=False): callers need a key unless the function says "
                f'access="public": @app.function(access="public")',
                parameter=option,
            )
        if is_unsupported(f"{option}="):
            raise not_supported(f"{option}=")
        raise InvalidInput(f"@{name}: unknown option {option}=", parameter=option)
    mark = {**({} if example is None else {"example": example}), **details}

    def put(function: F) -> F:
        set_metadata(_function(name, function), "asgi", mark or True)
        return function

    return put

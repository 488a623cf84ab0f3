"""`Function`: the handle of a declared or deployed function or method, and its ways to be
called."""

from __future__ import annotations

from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar

from pilotlight.client import sessions
from pilotlight.client.json_stream import without_none
from pilotlight.client.pickling import dump_arguments, dump_json_arguments
from pilotlight.client.responses import call_headers
from pilotlight.errors import InvalidInput, NotFound
from pilotlight.sdk import active_app, parallel_map
from pilotlight.sdk.binding.bound import Binding, bound_options, merged
from pilotlight.sdk.calls import FunctionCall
from pilotlight.sdk.declaration import Declaration
from pilotlight.sdk.options import parse_priority
from pilotlight.sdk.parallel_map import DEFAULT_CONCURRENCY, Input, MapOptions
from pilotlight.sdk.schema import parameter_names
from pilotlight.sdk.sync_async import SyncAsyncMethod, with_short_errors
from pilotlight.sdk.unsupported import not_supported, refuse_attributes
from pilotlight.spec.function import FunctionKind
from pilotlight.spec.identifiers import Priority, require_customer, require_name

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Options of a handle's calls (`Function.with_options`)."""

    priority: Priority | None = None
    webhook: str = ""
    idempotency_key: str = ""
    customer: str = ""


NO_OPTIONS = CallOptions()


@refuse_attributes
class Function(Generic[P, R]):
    """The handle of a function on the platform, or of a method of a class.

    - `.remote(…)` runs it on the platform and waits for the result.
    - `.local(…)` runs it in this process.
    - `.remote_gen(…)` runs a generator on the platform and iterates over its items.
    - `.map(…)`, `.starmap(…)` and `.for_each(…)` make many calls in parallel.
    - `.spawn(…)` starts a call in the background and returns a `FunctionCall`; `.spawn_map(…)` many
      of them.
    - `.get_web_url()` is the address of a web application.

    Each of them except `.local` has an asynchronous form: `await f.remote.aio(…)`."""

    def __init__(
        self,
        *,
        app: str,
        name: str,
        method: str = "",
        tenant: str = "",
        declaration: Declaration | None = None,
        body: Callable[P, R] | None = None,
        options: CallOptions = NO_OPTIONS,
        binding: Binding | None = None,
    ) -> None:
        self._options = options
        self._binding = binding
        self._app = app
        self._name = name
        self._tenant = tenant
        self._method = method
        self._declaration = declaration
        self._body = body
        if declaration is not None and not method:
            self.__pilotlight__ = declaration
            self.__name__ = str(declaration.raw.__name__)
            self.__qualname__ = str(declaration.raw.__qualname__)
            self.__module__ = declaration.module
            self.__doc__ = declaration.raw.__doc__
            self.__wrapped__ = declaration.raw

    def __repr__(self) -> str:
        owner = f"{self._tenant}: " if self._tenant else ""
        return f"<Function {owner}{self._app}/{self._path}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_name, (
            self._app,
            self._name,
            self._method,
            self._tenant,
            (
                self._options.priority and self._options.priority.value,
                self._binding,
                self._options.customer,
            ),
        )

    @classmethod
    def from_name(
        cls, app: str, name: str, *, tenant: str | None = None, environment_name: str | None = None
    ) -> Function[..., Any]:
        """Return the handle of a deployed function, or of a method as `Class.method`. Makes no
        request; a wrong name fails when called.

        `tenant` names another tenant that shares the function. Such calls use JSON: arguments and
        results are JSON values, arguments are all by name or all by position, and an exception of
        the function is raised as FunctionRaised. Raises InvalidInput for an invalid name."""
        if environment_name is not None:
            raise not_supported("environment_name=")
        function, _, method = name.partition(".")
        return _by_name(
            require_name("app", app),
            require_name("function", function),
            method,
            require_name("tenant", tenant) if tenant else "",
        )

    def with_options(
        self,
        *,
        priority: str | None = None,
        webhook: str | None = None,
        idempotency_key: str | None = None,
        customer: str | None = None,
        **options: Any,
    ) -> Function[P, R]:
        """Return a handle of the same function with other options. Options not given keep their
        values.

        Args:
            priority: "realtime", "standard" or "batch", at most the highest that the plan allows.
            webhook: name of the webhook (`pilotlight webhook set`) that is notified when a call
                started with `.spawn()` ends.
            idempotency_key: key that identifies one call. `.remote()` and `.spawn()` with the same
                key and arguments are the same call and return the same result, so they can be
                retried after a lost connection. Use a new key for each further call.
            customer: your customer for whom the calls are made, as bills show it. Calls of a
                function are made for the customer of its own call where they name no other.
            options: as for `Cls.with_options`: the calls of the handle go to instances of their
                own."""
        given = without_none(
            {
                "priority": parse_priority(priority),
                "webhook": None if webhook is None else require_name("webhook", webhook),
                "idempotency_key": idempotency_key,
                "customer": None if customer is None else require_customer(customer),
            }
        )
        before = self._binding or Binding({}, {})
        chosen = merged(before.options, bound_options(options))
        return Function(
            app=self._app,
            name=self._name,
            method=self._method,
            tenant=self._tenant,
            declaration=self._declaration,
            body=self._body,
            options=replace(self._options, **given),
            binding=Binding(before.arguments, chosen) if before.arguments or chosen else None,
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Raise InvalidInput: choose `.remote(…)` or `.local(…)`."""
        raise InvalidInput(
            f"{self._path}(…) was called directly: call {self._path}.remote(…) to run it on the "
            f"platform, or {self._path}.local(…) to run it in this process"
        )

    @property
    def local(self) -> Callable[P, R]:
        """The undecorated function, which runs in this process."""
        if self._body is None:
            raise InvalidInput(
                f"{self!r} was looked up by name: its code is not available locally; use .remote(…)"
            )
        return self._body

    @property
    def remote(self) -> SyncAsyncMethod[P, R, Awaitable[R]]:
        """Run the function on the platform and wait for the result.

        Takes the arguments of the function. Raises the exception of the function with its original
        type, or FunctionRaised for a function of another tenant."""
        return SyncAsyncMethod(self._remote, self._remote_aio)

    @property
    def remote_gen(self) -> SyncAsyncMethod[P, Iterator[Any], AsyncIterator[Any]]:
        """Run a generator on the platform and iterate over its items as they are yielded.

        Leaving the loop early ends the generator on the platform."""
        return SyncAsyncMethod(self._remote_gen, self._remote_gen_aio)

    @property
    def spawn(self) -> SyncAsyncMethod[P, FunctionCall[R], Awaitable[FunctionCall[R]]]:
        """Start a call in the background and return a `FunctionCall` immediately. The call
        continues without this process.

        The call runs at least once: it is retried if its instance or the platform crashes, and as
        the `retries` of the function say (`pilotlight.context().attempt` is the number of the
        attempt). `.with_options(webhook="name").spawn(…)` notifies a webhook when the call ends."""
        return SyncAsyncMethod(self._spawn, self._spawn_aio)

    @property
    def map(self) -> SyncAsyncMethod[..., Iterator[R], AsyncIterator[R]]:
        """Call the function once per element of the iterables (zipped) and iterate over the
        results: `list(f.map([1, 2, 3]))`.

        Keywords:
            kwargs: keyword arguments of every call.
            order_outputs: False yields results as they complete, not in the order of inputs.
            return_exceptions: yield exceptions in place of results, instead of raising.
            concurrency: maximum number of calls in flight (default 64)."""
        return SyncAsyncMethod(self._map, self._map_aio)

    @property
    def starmap(self) -> SyncAsyncMethod[..., Iterator[R], AsyncIterator[R]]:
        """Like `map`, over tuples of arguments: `f.starmap([(1, 2), (3, 4)])`."""
        return SyncAsyncMethod(self._starmap, self._starmap_aio)

    @property
    def spawn_map(
        self,
    ) -> SyncAsyncMethod[..., list[FunctionCall[R]], Awaitable[list[FunctionCall[R]]]]:
        """Start a call in the background per element of the iterables (zipped), with `kwargs` each,
        and return their `FunctionCall`s when all of them are accepted:
        `pilotlight.FunctionCall.gather(*f.spawn_map([1, 2, 3]))`."""
        return SyncAsyncMethod(self._spawn_map, self._spawn_map_aio)

    @property
    def for_each(self) -> SyncAsyncMethod[..., None, Awaitable[None]]:
        """Like `map` for side effects: wait for all calls and return None. With
        `ignore_exceptions=True` failed calls do not raise."""
        return SyncAsyncMethod(self._for_each, self._for_each_aio)

    def get_web_url(self) -> str | None:
        """Return the address of this web application, without a slash at its end; None for a
        function that is not one. Callers need a key, unless the function says access="public"."""
        if self._declaration is not None and self._declaration.kind is not FunctionKind.ASGI:
            return None
        app = self._app if self._tenant else active_app.deployed_name(self._app)
        owner = f"/t/{self._tenant}" if self._tenant else ""
        return f"{sessions.current_profile().url.rstrip('/')}{owner}/fn/{app}/{self._name}"

    @with_short_errors
    def warmup(self) -> None:
        """Start one instance. Raises InvalidInput for a function of another tenant."""
        if self._tenant:
            raise InvalidInput(f"{self!r} belongs to another tenant: only the owner can warm it up")
        self._with_target(sessions.client().warmup)

    @property
    def address(self) -> str:
        """Its name as other declarations refer to it: `app/function` or `app/Class.method`. Raises
        InvalidInput for a function of another tenant."""
        if self._tenant:
            raise InvalidInput(f"{self!r} belongs to another tenant: name a function of your own")
        return f"{self._app}/{self._path}"

    @property
    def _path(self) -> str:
        return f"{self._name}.{self._method}" if self._method else self._name

    @property
    def _deployed_app(self) -> str:
        return self._app if self._tenant else active_app.deployed_name(self._app)

    def _dotted(self, name: str) -> str:
        return f"{name}.{self._method}" if self._method else name

    @property
    def _target(self) -> tuple[str, str]:
        """App and function of a call."""
        app, binding = self._deployed_app, self._binding
        return app, self._dotted(self._name if binding is None else binding.name(app, self._name))

    async def _target_aio(self) -> tuple[str, str]:
        app, binding = self._deployed_app, self._binding
        if binding is None:
            return app, self._path
        return app, self._dotted(await binding.name_aio(app, self._name))

    def _must_ask_again(self) -> bool:
        """Whether the target was not found because its bound function ended with a deploy."""
        return self._binding is not None and self._binding.forget(self._deployed_app, self._name)

    def _with_target(self, send: Callable[..., T], *args: Any, **ways: Any) -> T:
        try:
            return send(*self._target, *args, **ways)
        except NotFound as e:
            if not self._must_ask_again():
                raise self._not_there(e) from e
        try:
            return send(*self._target, *args, **ways)
        except NotFound as e:
            raise self._not_there(e) from e

    async def _with_target_aio(
        self, send: Callable[..., Awaitable[T]], *args: Any, **ways: Any
    ) -> T:
        try:
            return await send(*await self._target_aio(), *args, **ways)
        except NotFound as e:
            if not self._must_ask_again():
                raise self._not_there(e) from e
        try:
            return await send(*await self._target_aio(), *args, **ways)
        except NotFound as e:
            raise self._not_there(e) from e

    def _ways(self, *, streams: bool) -> dict[str, Any]:
        """Return the tenant and headers of a call."""
        headers = call_headers(
            streams=streams,
            pickles=not self._tenant,
            priority=self._options.priority or "",
            webhook=self._options.webhook,
            idempotency_key=self._options.idempotency_key,
            customer=self._options.customer,
        )
        return {"tenant": self._tenant, "headers": headers}

    @property
    def _parameters(self) -> tuple[str, ...]:
        return parameter_names(self._body) if self._body is not None else ()

    def _packed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        if self._tenant:
            return dump_json_arguments(f"{self._path}(…)", args, kwargs)
        return dump_arguments(f"{self._path}(…)", self._parameters, args, kwargs)

    def _check_single(self, verb: str) -> None:
        if self._declaration is not None and self._declaration.kind is FunctionKind.ASGI:
            raise InvalidInput(
                f"{self._path} is a web application: send requests to {self._path}.get_web_url() "
                f"instead of .{verb}(…)"
            )
        if self._declaration is not None and self._declaration.is_generator(self._method):
            raise InvalidInput(
                f"{self._path} is a generator: iterate over {self._path}.remote_gen(…) instead of "
                f".{verb}(…)"
            )

    def _not_there(self, error: NotFound) -> NotFound:
        if self._tenant:
            return NotFound(
                f"{error}; tenant {self._tenant!r} has no {self._app}/{self._path}, or does not "
                f"share it",
                **error.detail,
            )
        hint = (
            f"; deploy it with 'pilotlight deploy', or call it inside 'with app.run():' "
            f"({self._app}/{self._path})"
        )
        return NotFound(f"{error}{hint}", **error.detail)

    def _remote(self, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check_single("remote")
        answer = self._with_target(
            sessions.client().invoke, self._packed(args, kwargs), **self._ways(streams=False)
        )
        result: R = answer.value()
        return result

    async def _remote_aio(self, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check_single("remote")
        client = await sessions.async_client()
        answer = await self._with_target_aio(
            client.invoke, self._packed(args, kwargs), **self._ways(streams=False)
        )
        result: R = answer.value()
        return result

    def _remote_gen(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Any]:
        body, ways, has_begun = self._packed(args, kwargs), self._ways(streams=True), False
        try:
            for item in sessions.client().invoke_stream(*self._target, body, **ways):
                has_begun = True
                yield item
            return
        except NotFound:
            if has_begun or not self._must_ask_again():
                raise
        yield from sessions.client().invoke_stream(*self._target, body, **ways)

    async def _remote_gen_aio(self, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Any]:
        client, has_begun = await sessions.async_client(), False
        body, ways = self._packed(args, kwargs), self._ways(streams=True)
        try:
            async for item in client.invoke_stream(*await self._target_aio(), body, **ways):
                has_begun = True
                yield item
            return
        except NotFound:
            if has_begun or not self._must_ask_again():
                raise
        async for item in client.invoke_stream(*await self._target_aio(), body, **ways):
            yield item

    def _spawn(self, *args: P.args, **kwargs: P.kwargs) -> FunctionCall[R]:
        call_id = self._with_target(
            sessions.client().submit, self._packed(args, kwargs), **self._ways(streams=False)
        )
        return FunctionCall(call_id, pickles=not self._tenant)

    async def _spawn_aio(self, *args: P.args, **kwargs: P.kwargs) -> FunctionCall[R]:
        client = await sessions.async_client()
        call_id = await self._with_target_aio(
            client.submit, self._packed(args, kwargs), **self._ways(streams=False)
        )
        return FunctionCall(call_id, pickles=not self._tenant)

    def _spawn_map(
        self, *iterables: Iterable[Any], kwargs: Mapping[str, Any] | None = None
    ) -> list[FunctionCall[R]]:
        inputs = parallel_map.inputs_of(zip(*iterables, strict=False), kwargs)
        loop = sessions.background_loop()
        return list(parallel_map.run_sync(self._spawn_aio, inputs, MapOptions(), loop))

    async def _spawn_map_aio(
        self,
        *iterables: Iterable[Any] | AsyncIterable[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[FunctionCall[R]]:
        inputs = parallel_map.zip_inputs(iterables, kwargs)
        return [c async for c in parallel_map.run_async(self._spawn_aio, inputs, MapOptions())]

    def _map(
        self,
        *iterables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        order_outputs: bool = True,
        return_exceptions: bool = False,
        concurrency: int = DEFAULT_CONCURRENCY,
    ) -> Iterator[R]:
        """`kwargs` are passed to every call; `order_outputs=False` yields results as completed."""
        options = MapOptions(
            concurrency=concurrency, ordered=order_outputs, return_exceptions=return_exceptions
        )
        inputs = parallel_map.inputs_of(zip(*iterables, strict=False), kwargs)
        return self._run_sync(inputs, options)

    def _map_aio(
        self,
        *iterables: Iterable[Any] | AsyncIterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        order_outputs: bool = True,
        return_exceptions: bool = False,
        concurrency: int = DEFAULT_CONCURRENCY,
    ) -> AsyncIterator[R]:
        options = MapOptions(
            concurrency=concurrency, ordered=order_outputs, return_exceptions=return_exceptions
        )
        self._check_single("map")
        return parallel_map.run_async(
            self._remote_aio, parallel_map.zip_inputs(iterables, kwargs), options
        )

    def _starmap(
        self,
        inputs: Iterable[Iterable[Any]],
        *,
        kwargs: Mapping[str, Any] | None = None,
        order_outputs: bool = True,
        return_exceptions: bool = False,
        concurrency: int = DEFAULT_CONCURRENCY,
    ) -> Iterator[R]:
        options = MapOptions(
            concurrency=concurrency, ordered=order_outputs, return_exceptions=return_exceptions
        )
        return self._run_sync(parallel_map.inputs_of(inputs, kwargs), options)

    def _starmap_aio(
        self,
        inputs: Iterable[Iterable[Any]],
        *,
        kwargs: Mapping[str, Any] | None = None,
        order_outputs: bool = True,
        return_exceptions: bool = False,
        concurrency: int = DEFAULT_CONCURRENCY,
    ) -> AsyncIterator[R]:
        options = MapOptions(
            concurrency=concurrency, ordered=order_outputs, return_exceptions=return_exceptions
        )
        self._check_single("starmap")
        return parallel_map.run_async(
            self._remote_aio, parallel_map.inputs_of(inputs, kwargs), options
        )

    def _for_each(
        self,
        *iterables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        ignore_exceptions: bool = False,
    ) -> None:
        for _ in self._map(
            *iterables, kwargs=kwargs, order_outputs=False, return_exceptions=ignore_exceptions
        ):
            pass

    async def _for_each_aio(
        self,
        *iterables: Iterable[Any] | AsyncIterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        ignore_exceptions: bool = False,
    ) -> None:
        async for _ in self._map_aio(
            *iterables, kwargs=kwargs, order_outputs=False, return_exceptions=ignore_exceptions
        ):
            pass

    def _run_sync(self, inputs: Iterable[Input], options: MapOptions) -> Iterator[R]:
        self._check_single("map")
        return parallel_map.run_sync(self._remote_aio, inputs, options, sessions.background_loop())


def _by_name(
    app: str,
    name: str,
    method: str,
    tenant: str = "",
    ways: tuple[str | None, Binding | None] | tuple[str | None, Binding | None, str] = (None, None),
) -> Function[..., Any]:
    priority, binding, *more = ways  # a handle of an earlier version has no customer
    options = CallOptions(priority=parse_priority(priority), customer=more[0] if more else "")
    return Function(
        app=app, name=name, method=method, tenant=tenant, options=options, binding=binding
    )

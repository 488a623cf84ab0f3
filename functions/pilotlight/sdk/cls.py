"""`Cls` and `Obj`: handles of a declared class and of its objects; and its methods that are marked
with `@method()`, seen from inside."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from pilotlight.errors import InvalidInput
from pilotlight.sdk.batches import local_body
from pilotlight.sdk.binding.bound import Binding, bound_options, merged
from pilotlight.sdk.binding.parameters import PARAMETERS_ATTRIBUTE, Parameter
from pilotlight.sdk.declaration import Declaration, members
from pilotlight.sdk.function import Function
from pilotlight.sdk.unsupported import is_unsupported, not_supported
from pilotlight.spec.identifiers import require_name

T = TypeVar("T")

HOME_ATTRIBUTE = "_pilotlight_home"
"""Of a declared class: (app, function)."""
_REMOTE_VERBS = frozenset(
    {"remote", "remote_gen", "map", "starmap", "for_each", "spawn", "spawn_map", "with_options"}
)


class Cls(Generic[T]):
    """The handle of a class on the platform. Calling it returns an object whose methods are
    `Function` handles: `Embedder().embed.remote("text")`."""

    def __init__(
        self,
        *,
        app: str,
        name: str,
        tenant: str = "",
        declaration: Declaration | None = None,
        web: Mapping[str, Declaration] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`web`: the declarations of its web applications, by method. `options`: of
        `with_options`."""
        self._web = web or {}
        self._options = options or {}
        self._app = app
        self._name = name
        self._tenant = tenant
        self._declaration = declaration
        if declaration is not None:
            self.__pilotlight__ = declaration
            self.__name__ = str(declaration.raw.__name__)
            self.__qualname__ = str(declaration.raw.__qualname__)
            self.__module__ = declaration.module
            self.__doc__ = declaration.raw.__doc__
            self.__wrapped__ = declaration.raw

    def __repr__(self) -> str:
        return f"<Cls {self._app}/{self._name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _cls_by_name, (self._app, self._name, self._tenant, self._options)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        if self._declaration is None:
            raise InvalidInput(
                f"{self!r} was looked up by name: its code is not available locally, so it cannot "
                f"be a base class"
            )
        return (self._declaration.raw,)

    @classmethod
    def from_name(
        cls, app: str, name: str, *, tenant: str | None = None, environment_name: str | None = None
    ) -> Cls[Any]:
        """Return the handle of a deployed class. Makes no request; a wrong name fails when a method
        is called.

        `tenant` names another tenant that shares the class (see `Function.from_name`). Raises
        InvalidInput for an invalid name."""
        if environment_name is not None:
            raise not_supported("environment_name=")
        return _cls_by_name(
            require_name("app", app),
            require_name("function", name, parameter="name"),
            require_name("tenant", tenant) if tenant else "",
        )

    def with_options(self, **options: Any) -> Cls[T]:
        """Return a handle of the class with other options, whose objects have instances of their
        own: `Model.with_options(gpu="H100", max_instances=2)().run.remote(…)`. They end with the
        next deploy, and are made again by the next call.

        Options: `cpu, memory, gpu, env, secrets, retries, timeout, startup_timeout, queue_timeout,
        max_instances, buffer_instances, scaledown_window, waiting_cost` (also by Modal's names).
        Using the handle needs a key that may deploy. Raises InvalidInput naming any other."""
        return self._with(bound_options(options))

    def with_concurrency(self, *, max_inputs: int, target_inputs: int | None = None) -> Cls[T]:
        """Return a handle of the class, as `with_options`, with other numbers of concurrent
        calls."""
        return self._with({"scaling": {"max_inputs": max_inputs, "target_inputs": target_inputs}})

    def _with(self, options: Mapping[str, Any]) -> Cls[T]:
        return Cls(
            app=self._app,
            name=self._name,
            tenant=self._tenant,
            declaration=self._declaration,
            web=self._web,
            options=merged(self._options, options),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Obj:
        if args:
            raise InvalidInput(
                f"{self._name}({args[0]!r}): pass arguments by name, {self._name}(NAME=…)"
            )
        known = parameters_of(self._declaration)
        return Obj(
            app=self._app,
            name=self._name,
            tenant=self._tenant,
            declaration=self._declaration,
            web=self._web,
            arguments=kwargs,
            binding=Binding.of(self._name, known, kwargs, self._options),
        )

    def __getattr__(self, attribute: str) -> Any:
        if is_unsupported(f"Cls.{attribute}"):
            raise not_supported(f"Cls.{attribute}")
        if attribute.startswith("__") or self._declaration is None:
            raise AttributeError(f"{self!r} has no attribute {attribute!r}")
        if attribute in self._web:
            return self._web_handle(attribute)
        if attribute in self._declaration.method_names():
            raise InvalidInput(
                f"{self._name}.{attribute} was used on the class: create an object first, "
                f"{self._name}().{attribute}.remote(…)"
            )
        return getattr(self._declaration.raw, attribute)

    def _web_handle(self, method: str) -> Function[..., Any]:
        return _web_handle(self._app, self._web[method])


class Obj:
    """An object of a `Cls`. Its methods are `Function` handles; other attributes are those of a
    local object, which is created on first use.

    The local object is created and entered once per process; `_lock` guards that."""

    def __init__(
        self,
        *,
        app: str,
        name: str,
        tenant: str = "",
        declaration: Declaration | None,
        web: Mapping[str, Declaration] | None = None,
        arguments: Mapping[str, Any] | None = None,
        binding: Binding | None = None,
    ) -> None:
        """`arguments`: of its parameters; `binding`: with those, the options of its class."""
        self._web = web or {}
        self._arguments = arguments or {}
        self._binding = binding
        self._app = app
        self._name = name
        self._tenant = tenant
        self._declaration = declaration
        self._lock = threading.Lock()
        self._instance: Any = None

    def __repr__(self) -> str:
        bound = f"({self._binding})" if self._binding is not None else ""
        return f"<Obj {self._app}/{self._name}{bound}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _obj_by_name, (self._app, self._name, self._tenant, self._binding)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(f"{self!r} has no attribute {attribute!r}")
        declaration = self._declaration
        if declaration is None:
            return Function(
                app=self._app,
                name=self._name,
                method=attribute,
                tenant=self._tenant,
                binding=self._binding,
            )
        if attribute in self._web:
            return _web_handle(self._app, self._web[attribute])
        if attribute not in declaration.method_names():
            return self._local_attribute(attribute)
        body = local_body(_LocalMethod(self, attribute), getattr(declaration.raw, attribute))
        return Function(
            app=self._app,
            name=self._name,
            method=attribute,
            declaration=declaration,
            body=body,
            binding=self._binding,
        )

    def _local_attribute(self, attribute: str) -> Any:
        declaration = self._declaration
        assert declaration is not None  # objects of from_name have no local attributes
        try:
            return getattr(self._entered(), attribute)
        except AttributeError as e:
            known = ", ".join(declaration.method_names())
            raise AttributeError(
                f"{self._name} has no method or attribute {attribute!r}; its @pilotlight.method()s "
                f"are: {known}"
            ) from e

    def _entered(self) -> Any:
        with self._lock:
            if self._instance is None:
                assert self._declaration is not None
                instance = self._declaration.raw()
                for name, value in self._arguments.items():
                    setattr(instance, name, value)
                _run_hooks(instance, self._declaration.raw)
                self._instance = instance
            return self._instance


class _LocalMethod:
    """`.local` of a method. The first call creates the local object and runs its @enter methods."""

    def __init__(self, obj: Obj, name: str) -> None:
        self._obj = obj
        self._name = self.__name__ = name
        declaration = obj._declaration
        assert declaration is not None
        parameters = list(inspect.signature(getattr(declaration.raw, name)).parameters.values())
        self.__signature__ = inspect.Signature(parameters[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._obj._entered(), self._name)(*args, **kwargs)


def _run_hooks(instance: Any, kind: type) -> None:
    hooks = [
        (bool(marks["enter"].get("snap", True)), name)
        for name, marks, _ in members(kind)
        if "enter" in marks
    ]
    for wanted in (True, False):
        for name in (name for snap, name in hooks if snap is wanted):
            result = getattr(instance, name)()
            if inspect.iscoroutine(result):
                asyncio.run(result)


class MarkedMethod:
    """The descriptor in the body of a class.

    Attributes:
        marked_function: the plain function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.marked_function = function
        functools.update_wrapper(self, function, updated=())  # marks stay on the function

    def __repr__(self) -> str:
        return f"<MarkedMethod {self.marked_function.__qualname__}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self.marked_function
        return BoundMethod(self.marked_function, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain function, as for a decorator that is placed above."""
        return self.marked_function(*args, **kwargs)


class BoundMethod:
    """A marked method of an object. Calling it runs it in this process, as `.local(…)` does;
    `.remote(…)` and the others run it on the platform, in an instance of the object's class."""

    def __init__(self, function: Callable[..., Any], instance: Any) -> None:
        self.local = function.__get__(instance)
        self.__wrapped__ = self.local
        self._instance = instance

    def __repr__(self) -> str:
        return f"<BoundMethod {self.local.__qualname__}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method in this process."""
        return self.local(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            return getattr(self.local, name)
        if name not in _REMOTE_VERBS:
            raise AttributeError(f"{self.local.__qualname__} has no attribute {name!r}")
        return getattr(self._handle(name), name)

    def _handle(self, verb: str) -> Function[..., Any]:
        kind, method = type(self._instance), self.local.__name__
        home = getattr(kind, HOME_ATTRIBUTE, None)
        if home is None:
            raise InvalidInput(
                f"{self.local.__qualname__}.{verb}(…) was called on a plain {kind.__name__} "
                f"object. Outside the class: decorate it with @app.cls() and call "
                f"{kind.__name__}().{method}.{verb}(…). Inside the class: call self.{method}(…), "
                "which runs in the same instance."
            )
        app, function = home
        values = {
            name: getattr(self._instance, name)
            for name in getattr(kind, PARAMETERS_ATTRIBUTE, {})
            if hasattr(self._instance, name)
        }
        binding = Binding.of(kind.__name__, getattr(kind, PARAMETERS_ATTRIBUTE, {}), values)
        return Function(app=app, name=function, method=method, binding=binding)


def parameters_of(declaration: Declaration | None) -> Mapping[str, Parameter] | None:
    """Return the parameters of a declared class; None for one that is only known by name."""
    if declaration is None:
        return None
    found: Mapping[str, Parameter] = getattr(declaration.raw, PARAMETERS_ATTRIBUTE, {})
    return found


def _web_handle(app: str, declaration: Declaration) -> Function[..., Any]:
    return Function(app=app, name=declaration.name, method="", declaration=declaration)


def _cls_by_name(
    app: str, name: str, tenant: str = "", options: Mapping[str, Any] | None = None
) -> Cls[Any]:
    return Cls(app=app, name=name, tenant=tenant, options=options)


def _obj_by_name(app: str, name: str, tenant: str = "", binding: Binding | None = None) -> Obj:
    return Obj(app=app, name=name, tenant=tenant, declaration=None, binding=binding)

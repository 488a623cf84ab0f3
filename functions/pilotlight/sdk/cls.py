"""`Cls` and `Obj`: handles of a declared class and of its objects."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any, Generic, TypeVar

from pilotlight.errors import InvalidInput
from pilotlight.sdk.batches import local_body
from pilotlight.sdk.declaration import Declaration, members
from pilotlight.sdk.function import Function
from pilotlight.spec.identifiers import require_name

T = TypeVar("T")


class Cls(Generic[T]):
    """The handle of a class on the platform. Calling it returns an object whose methods are
    `Function` handles: `Embedder().embed.remote("text")`."""

    def __init__(
        self, *, app: str, name: str, tenant: str = "", declaration: Declaration | None = None
    ) -> None:
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
        return _cls_by_name, (self._app, self._name, self._tenant)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        if self._declaration is None:
            raise InvalidInput(
                f"{self!r} was looked up by name: its code is not available locally, so it cannot "
                f"be a base class"
            )
        return (self._declaration.raw,)

    @classmethod
    def from_name(cls, app: str, name: str, *, tenant: str | None = None) -> Cls[Any]:
        """Return the handle of a deployed class. Makes no request; a wrong name fails when a method
        is called.

        `tenant` names another tenant that shares the class (see `Function.from_name`). Raises
        InvalidInput for an invalid name."""
        return _cls_by_name(
            require_name("app", app),
            require_name("function", name, parameter="name"),
            require_name("tenant", tenant) if tenant else "",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Obj:
        if args or kwargs:
            raise InvalidInput(
                f"{self._name}(…) takes no arguments, because all callers share its instances: "
                "pass the value to the method, or read it from env= or secrets= in "
                "@pilotlight.enter()"
            )
        return Obj(
            app=self._app, name=self._name, tenant=self._tenant, declaration=self._declaration
        )

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or self._declaration is None:
            raise AttributeError(f"{self!r} has no attribute {attribute!r}")
        if attribute in self._declaration.method_names():
            raise InvalidInput(
                f"{self._name}.{attribute} was used on the class: create an object first, "
                f"{self._name}().{attribute}.remote(…)"
            )
        return getattr(self._declaration.raw, attribute)


class Obj:
    """An object of a `Cls`. Its methods are `Function` handles; other attributes are those of a
    local object, which is created on first use.

    The local object is created and entered once per process; `_lock` guards that."""

    def __init__(
        self, *, app: str, name: str, tenant: str = "", declaration: Declaration | None
    ) -> None:
        self._app = app
        self._name = name
        self._tenant = tenant
        self._declaration = declaration
        self._lock = threading.Lock()
        self._instance: Any = None

    def __repr__(self) -> str:
        return f"<Obj {self._app}/{self._name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _obj_by_name, (self._app, self._name, self._tenant)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(f"{self!r} has no attribute {attribute!r}")
        declaration = self._declaration
        if declaration is None:
            return Function(app=self._app, name=self._name, method=attribute, tenant=self._tenant)
        if attribute not in declaration.method_names():
            return self._local_attribute(attribute)
        body = local_body(_LocalMethod(self, attribute), getattr(declaration.raw, attribute))
        return Function(
            app=self._app, name=self._name, method=attribute, declaration=declaration, body=body
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


def _cls_by_name(app: str, name: str, tenant: str = "") -> Cls[Any]:
    return Cls(app=app, name=name, tenant=tenant)


def _obj_by_name(app: str, name: str, tenant: str = "") -> Obj:
    return Obj(app=app, name=name, tenant=tenant, declaration=None)

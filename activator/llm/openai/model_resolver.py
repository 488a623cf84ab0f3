"""Resolves the text of `model` to a function, a revision and an adapter.

`app/function`, `app/function@tag` (a tag, an alias or a revision), either with `:adapter`; or the
bare name of a function or of an adapter if it is unique in the key's environment. What a caller may
not call is reported as not existing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from activator.access.resolver import RequestResolver
from activator.http.request import Request
from activator.llm.openai.errors import ModelNotFound
from activator.routing.api_keys import Principal
from activator.routing.call_target import CallTarget
from activator.routing.model_catalog import Engine
from activator.routing.route_table import FunctionRouter, RouteTable
from pilotlight import errors

MAX_KNOWN = 4096
"""Maximum number of cached names: resolving one takes some tens of microseconds, and a flood of
names must not fill the memory."""
MAX_NAME = 512
NEAR = 5
"""Number of similar models in an error."""
MAX_COMPARED = 100
"""Number of names to compare with an unknown one, at some 0.15 milliseconds of the event loop
each."""
MAX_LIKE = 200
"""Longer names are not compared: all valid names are shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelName:
    """The parts of a model's name; `place` is a function's address or a bare name, `asked` and
    `adapter` are "" if missing."""

    place: str
    asked: str = ""
    adapter: str = ""


def parse(text: str) -> ModelName:
    """Split the text of `model` into its parts."""
    name, _, adapter = text.partition(":")
    place, _, asked = name.partition("@")
    return ModelName(place=place, asked=asked, adapter=adapter)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A resolved model: its function's revisions, the requested one ("" = by traffic split), and
    the adapter ("" = none)."""

    routed: FunctionRouter
    asked: str
    adapter: str


class Models:
    """Resolves and lists models. Owner: the event loop; every method is synchronous."""

    def __init__(self, *, table: RouteTable, resolver: RequestResolver) -> None:
        self._table = table
        self._resolver = resolver
        self._known: dict[tuple[str, bytes, str | None, str], ResolvedModel] = {}
        self._known_at = -1

    def __repr__(self) -> str:
        return f"<Models {len(self._known)} known, {self._table.engines!r}>"

    def find(
        self, request: Request, caller: Principal, owner: str | None, text: str
    ) -> ResolvedModel:
        """Resolve `text` for this caller; `owner`: the tenant that the path names. Raises
        ModelNotFound, Forbidden, Unavailable."""
        if self._known_at != self._table.generation or len(self._known) >= MAX_KNOWN:
            self._known.clear()
            self._known_at = self._table.generation
        asked = (caller.key_id, request.headers.get(b"pilotlight-environment", b""), owner, text)
        found = self._known.get(asked)
        if found is None:
            found = self._find(request, caller, owner, text)
            if not caller.is_anonymous and len(text) <= MAX_NAME:
                self._known[asked] = found
        return found

    def _find(
        self, request: Request, caller: Principal, owner: str | None, text: str
    ) -> ResolvedModel:
        if not text:
            raise errors.InvalidInput(
                "model: name a model, such as app/function", parameter="model"
            )
        name = parse(text)
        if "/" not in name.place:
            name = self._by_bare_name(request, caller, owner, name)
        try:
            routed, method, _ = self._resolver.routed(request, caller, name.place, owner)
        except errors.NotFound as e:
            raise self.unknown(request, caller, owner, text) from e
        if method:
            raise self.unknown(request, caller, owner, text)
        return ResolvedModel(routed=routed, asked=name.asked, adapter=name.adapter)

    def _by_bare_name(
        self, request: Request, caller: Principal, owner: str | None, name: ModelName
    ) -> ModelName:
        """Replace a bare name by the function's address. Raises ModelNotFound, or InvalidInput for
        an ambiguous name."""
        engines = self.visible(request, caller, owner)
        found = [
            ModelName(place=one.model, asked=name.asked, adapter=name.adapter)
            for one in engines
            if one.function == name.place
        ]
        if not found and not name.adapter:
            found = [
                ModelName(place=o.model, asked=name.asked, adapter=name.place)
                for o in engines
                if name.place in o.adapters
            ]
        if len(found) > 1:
            several = ", ".join(
                sorted(f"{one.place}:{one.adapter}" if one.adapter else one.place for one in found)[
                    :NEAR
                ]
            )
            raise errors.InvalidInput(
                f"model: the name {name.place[:80]!r} is ambiguous: use one of {several}",
                parameter="model",
            )
        if not found:
            raise self.unknown(request, caller, owner, name.place)
        return found[0]

    def visible(self, request: Request, caller: Principal, owner: str | None) -> list[Engine]:
        """The engines that this caller may call, by name: of its own tenant, or of the one that the
        path names."""
        tenant = caller.tenant if owner is None else self._table.tenants.named(owner)
        environment = self._resolver.environment_of(request, caller)
        if tenant is None:
            return []
        return [
            engine
            for engine in self._table.engines.of(tenant, environment)
            if engine.is_open_to(caller.tenant, caller.tenant_name) and _reaches(caller, engine)
        ]

    def described(
        self, request: Request, caller: Principal, owner: str | None, text: str
    ) -> dict[str, Any] | None:
        """The entry of one model, by its full name or by a unique bare one; None if there is
        none."""
        engines = self.visible(request, caller, owner)
        found = [one for engine in engines for one in listed(engine) if one["id"] == text]
        if not found and "/" not in text:
            there = [
                (engine, f"{engine.model}:{text}" if text in engine.adapters else engine.model)
                for engine in engines
            ]
            found = [
                one
                for engine, model in there
                if text in (engine.function, *engine.adapters)
                for one in listed(engine)
                if one["id"] == model
            ]
        return found[0] if len(found) == 1 else None

    def unknown(
        self, request: Request, caller: Principal, owner: str | None, text: str
    ) -> errors.PilotlightError:
        """The error for an unknown name, with similar names that the caller may have meant."""
        if caller.is_anonymous:
            return self._resolver.stranger(request)
        near = near_names(
            text,
            (
                model
                for engine in self.visible(request, caller, owner)
                for model in engine.unversioned()
            ),
        )
        hint = (
            f"available are {', '.join(near)}"
            if near
            else "this key can call none: `pilotlight app list` shows the deployed functions"
        )
        return ModelNotFound(f"no model {text[:80]!r}: {hint}", parameter="model", models=near)


def near_names(text: str, there: Iterable[str]) -> list[str]:
    """Up to NEAR of the first MAX_COMPARED names that are similar; the first ones if none is."""
    some = list(islice(there, MAX_COMPARED))
    near = (
        difflib.get_close_matches(text, some, n=NEAR, cutoff=0.5) if len(text) <= MAX_LIKE else []
    )
    return near or some[:NEAR]


def _reaches(caller: Principal, engine: Engine) -> bool:
    try:
        caller.check_reach(environment=engine.environment, app=engine.app, function=engine.function)
    except errors.Forbidden:
        return False
    return True


def listed(engine: Engine) -> list[dict[str, Any]]:
    """Its entries in a list of models."""
    return [_entry(model, engine.model, engine.max_model_len) for model in engine.models()]


def served_by(target: CallTarget) -> list[dict[str, Any]]:
    """The entries behind `/fn/`, where a model is one of the engine's own names."""
    found = target.spec.language_model
    if found is None:
        return []
    return [
        _entry(model, target.function, found.max_model_len)
        for model in (target.function, *found.others)
    ]


def _entry(model: str, root: str, max_model_len: int) -> dict[str, Any]:
    """An entry in OpenAI's format, with vLLM's additional fields."""
    return {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "pilotlight",
        "root": root,
        "parent": root if model != root else None,
        "max_model_len": max_model_len,
    }

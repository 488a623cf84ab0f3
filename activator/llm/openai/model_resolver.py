"""From the text in `model` to the function, the revision and the adapter that it names.

`app/function`, `app/function@tag` (a tag, an alias or a revision), either with `:adapter`; or the
bare name of a function, or of an adapter, where the key's environment has only one of that name.
What a caller may not call does not exist for it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from activator.http.request import Request
from activator.llm.openai.errors import ModelNotFound
from activator.llm.openai.model_catalog import Engine
from activator.routing.api_keys import Principal
from activator.routing.call_target import CallTarget
from activator.routing.resolver import RequestResolver
from activator.routing.route_table import FunctionRouter, RouteTable
from pilotlight import errors

MAX_KNOWN = 4096
"""Names whose meaning is remembered: finding one takes some tens of microseconds, and a flood of
names must not fill the memory."""
MAX_NAME = 512
NEAR = 5
"""Models that an error names."""
MAX_COMPARED = 100
"""Names that a wrong one is compared with, at some 0.15 milliseconds of the event loop each."""
MAX_LIKE = 200
"""A longer name is like none: an app's, a function's and an adapter's are together shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelName:
    """The parts of a model's name; `place` is a function's address or a bare name, `asked` and
    `adapter` are "" where it has none."""

    place: str
    asked: str = ""
    adapter: str = ""


def parse(text: str) -> ModelName:
    """The parts of what `model` says."""
    name, _, adapter = text.partition(":")
    place, _, asked = name.partition("@")
    return ModelName(place=place, asked=asked, adapter=adapter)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model: its function's revisions, the one that is asked for ("" = whatever the traffic
    says), and the adapter ("" = none)."""

    routed: FunctionRouter
    asked: str
    adapter: str


class Models:
    """Finds models, and lists them. Owner: the event loop; every method is synchronous."""

    def __init__(self, *, table: RouteTable, reception: RequestResolver) -> None:
        self._table = table
        self._reception = reception
        self._known: dict[tuple[str, bytes, str | None, str], ResolvedModel] = {}
        self._known_at = -1

    def __repr__(self) -> str:
        return f"<Models {len(self._known)} known, {self._table.engines!r}>"

    def find(
        self, request: Request, caller: Principal, owner: str | None, text: str
    ) -> ResolvedModel:
        """What `text` names for this caller; `owner`: of the tenant that the path names. Raises
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
                "model: write which one, such as app/function", parameter="model"
            )
        name = parse(text)
        if "/" not in name.place:
            name = self._by_bare_name(request, caller, owner, name)
        try:
            routed, method, _ = self._reception.routed(request, caller, name.place, owner)
        except errors.NotFound as e:
            raise self.unknown(request, caller, owner, text) from e
        if method:
            raise self.unknown(request, caller, owner, text)
        return ResolvedModel(routed=routed, asked=name.asked, adapter=name.adapter)

    def _by_bare_name(
        self, request: Request, caller: Principal, owner: str | None, name: ModelName
    ) -> ModelName:
        """The same with the function's whole address. Raises ModelNotFound, InvalidInput for a name
        that several have."""
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
                f"model: several are named {name.place[:80]!r}: write one of {several}",
                parameter="model",
            )
        if not found:
            raise self.unknown(request, caller, owner, name.place)
        return found[0]

    def visible(self, request: Request, caller: Principal, owner: str | None) -> list[Engine]:
        """The engines that this caller may call, by name: its own tenant's, or those of the one
        that the path names."""
        tenant = caller.tenant if owner is None else self._table.tenant_named(owner)
        environment = self._reception.environment_of(request, caller)
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
        """The entry of one model, by its whole name or by a bare one that only one has; None where
        it is none of these."""
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
        """The error for a name that means nothing to this caller: it lists those that it may have
        meant."""
        if caller.is_anonymous:
            return self._reception.stranger(request)
        near = near_names(
            text,
            (
                model
                for engine in self.visible(request, caller, owner)
                for model in engine.unversioned()
            ),
        )
        hint = (
            f"there are {', '.join(near)}"
            if near
            else "this key reaches none: `pilotlight app list` shows what is deployed"
        )
        return ModelNotFound(f"no model {text[:80]!r}: {hint}", parameter="model", models=near)


def near_names(text: str, there: Iterable[str]) -> list[str]:
    """Of the first MAX_COMPARED names up to NEAR that are like this one; where none is, the first
    ones."""
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
    """The same behind `/fn/`, where a model is one of the engine's own names."""
    engine = target.spec.engine
    if engine is None:
        return []
    return [
        _entry(model, target.function, engine.max_model_len)
        for model in (target.function, *sorted(engine.lora))
    ]


def _entry(model: str, root: str, max_model_len: int) -> dict[str, Any]:
    """In OpenAI's shape, with what vLLM says beside."""
    return {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "pilotlight",
        "root": root,
        "parent": root if model != root else None,
        "max_model_len": max_model_len,
    }

"""The functions of the controller's feed, by name, as compressed documents (about a kilobyte each),
with what must be known of each without parsing its document.

So thousands of functions at zero instances cost only their documents. Owner: the event loop,
through `RouteTable`."""

from __future__ import annotations

import json
import zlib
from typing import Any

from activator.routing.traffic_split import FunctionRouter
from pilotlight.protocol import FunctionRoute
from pilotlight.spec.cors import common_origins

Access = frozenset[frozenset[str]]
"""With whom each revision that answers is shared."""


class FunctionIndex:
    """Functions by `<tenant>/<environment>/<app>/<function>`.

    Attributes:
        access: with whom a function is shared, so that other callers are refused without parsing
            its document.
        origins: of a function with `cors`: the origins that every answering revision permits.
    """

    def __init__(self) -> None:
        self._documents: dict[str, tuple[str, bytes]] = {}
        """By name: the function's id, and its document."""
        self._names: dict[str, str] = {}
        self._kept_warm: set[str] = set()
        self._scheduled: set[str] = set()
        self.access: dict[str, Access] = {}
        self.origins: dict[str, frozenset[str]] = {}

    def __repr__(self) -> str:
        return f"<FunctionIndex {len(self)} functions>"

    def __len__(self) -> int:
        return len(self._documents)

    def put(self, name: str, value: Any, routed: FunctionRouter, *, id: str) -> None:
        """Store a function's document; `routed` and `id` are what it says."""
        self.remove(name)
        self.access[name] = frozenset(frozenset(target.spec.access) for target in routed.answering)
        if origins := common_origins(target.spec.cors for target in routed.answering):
            self.origins[name] = origins
        self._documents[name] = id, zlib.compress(json.dumps(value).encode(), level=1)
        self._names[id] = name
        if any(target.spec.scaling.schedules for target in routed.targets.values()):
            self._scheduled.add(name)
        if any(target.spec.scaling.min_instances for target in routed.targets.values()):
            self._kept_warm.add(name)

    def remove(self, name: str) -> None:
        """Remove a function, if it is there."""
        if (before := self._documents.pop(name, None)) is not None:
            del self._names[before[0]]
        self.access.pop(name, None)
        self.origins.pop(name, None)
        self._kept_warm.discard(name)
        self._scheduled.discard(name)

    def clear(self) -> None:
        """Remove all functions."""
        for held in (
            self._documents,
            self._names,
            self._kept_warm,
            self._scheduled,
            self.access,
            self.origins,
        ):
            held.clear()

    def route(self, name: str) -> FunctionRoute | None:
        """Parse a function's document; None = there is no such function."""
        if (found := self._documents.get(name)) is None:
            return None
        return FunctionRoute.from_json(json.loads(zlib.decompress(found[1])))

    def name_of(self, key: str) -> str:
        """Return the name of the function of a revision's platform-wide key; "" when it is
        unknown."""
        return self._names.get(key.rpartition("@")[0], "")

    def deployed(self) -> set[tuple[str, ...]]:
        """Return tenant, app and function of all functions, of whatever environment."""
        names = (name.split("/") for name in self._documents)
        return {(tenant, app, function) for tenant, _, app, function in names}

    def with_scaling_schedules(self) -> frozenset[str]:
        """Return the names of functions that need instances at certain times."""
        return frozenset(self._scheduled)

    def kept_warm(self) -> list[str]:
        """Return the names of functions that need instances without calls (`min_instances`)."""
        return sorted(self._kept_warm)

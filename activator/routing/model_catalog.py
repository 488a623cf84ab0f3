"""The functions that are language models, and the names of them and their adapters.

Kept next to the route table, which stores its documents packed: listing models, or resolving a bare
name, must not unpack thousands of functions. Owner: the event loop, through `RouteTable`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from activator.routing.traffic_split import FunctionRouter
from pilotlight.spec.function import PUBLIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One function that is a language model, as of its revision with most of the traffic.

    Attributes:
        adapters: names of adapters, or of further models, that it serves in addition.
        names: tags and aliases of its revisions.
        access: for each active revision, the tenants that may call it besides its own.
        max_model_len: tokens of prompt and answer together."""

    tenant: str
    environment: str
    app: str
    function: str
    adapters: tuple[str, ...]
    names: tuple[str, ...]
    access: tuple[frozenset[str], ...]
    max_model_len: int

    @property
    def model(self) -> str:
        """Its name as a model: `app/function`."""
        return f"{self.app}/{self.function}"

    def unversioned(self) -> Iterator[str]:
        """Its model names without those of revisions."""
        yield self.model
        for adapter in self.adapters:
            yield f"{self.model}:{adapter}"

    def models(self) -> Iterator[str]:
        """All its model names: its own, its adapters', its revisions'."""
        yield from self.unversioned()
        for name in self.names:
            yield f"{self.model}@{name}"

    def is_open_to(self, tenant: str, name: str) -> bool:
        """Whether a caller of this tenant (id and name) may know of it."""
        names = {PUBLIC, name} - {""}
        return tenant == self.tenant or all(not names.isdisjoint(access) for access in self.access)


class Engines:
    """All engines by `<tenant>/<environment>/<app>/<function>`."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}

    def __repr__(self) -> str:
        return f"<Engines {len(self._engines)}>"

    def __len__(self) -> int:
        return len(self._engines)

    def clear(self) -> None:
        """Remove all."""
        self._engines.clear()

    def apply(self, name: str, routed: FunctionRouter | None) -> None:
        """Set a function's routes; None: it was removed or stopped."""
        self._engines.pop(name, None)
        if routed is None:
            return
        target = routed.targets[routed.document.heaviest()]
        model = target.spec.language_model
        if model is not None:
            self._engines[name] = Engine(
                tenant=target.tenant,
                environment=target.environment,
                app=target.app,
                function=target.function,
                adapters=model.others,
                names=tuple(sorted(routed.document.tags)),
                access=tuple(frozenset(one.spec.access) for one in routed.answering),
                max_model_len=model.max_model_len,
            )

    def of(self, tenant: str, environment: str) -> Iterable[Engine]:
        """The engines of one tenant's environment, by name."""
        place = f"{tenant}/{environment}/"
        return [
            self._engines[name]
            for name in sorted(name for name in self._engines if name.startswith(place))
        ]

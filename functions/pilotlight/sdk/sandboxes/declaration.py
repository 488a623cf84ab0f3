"""The function of which each call is a sandbox. Its name follows from its options, so sandboxes
with equal options share spare instances and snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pilotlight.errors import InvalidInput
from pilotlight.sdk.declaration import Declaration
from pilotlight.sdk.declared_app import DeclaredApp
from pilotlight.sdk.llm import DeclarationSite
from pilotlight.sdk.options import resolve_options
from pilotlight.sdk.unsupported import is_unsupported, not_supported
from pilotlight.spec.function import FunctionKind, MethodSpec
from pilotlight.spec.sandboxes import (
    ARGUMENTS,
    ENTRY,
    MAX_SANDBOXES,
    MAX_TIMEOUT_S,
    NAME_PREFIX,
    QUEUE_S,
    SLACK_S,
)

OPTIONS = frozenset(
    {"image", "cpu", "memory", "secrets", "volumes", "block_network", "egress", "tags"}
    | {"buffer_instances", "max_instances", "scaledown_window", "snapshot"}
    | {"region", "cloud"}
)
"""Options of functions that sandboxes have."""
_BASE: Mapping[str, Any] = {
    "name": NAME_PREFIX.rstrip("-"),
    "description": "slots for commands of callers",
    "max_instances": MAX_SANDBOXES,
    "buffer_instances": 1,
    "timeout": MAX_TIMEOUT_S + SLACK_S,
    "queue_timeout": QUEUE_S,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SandboxDeclaration(Declaration):
    """A declared sandbox. Its code is the platform's own: `raw` is a `DeclarationSite`."""

    @property
    def by_value(self) -> bool:
        """Always False: it has no user code."""
        return False

    def methods(self) -> tuple[MethodSpec, ...]:
        """One callable: the life of a sandbox."""
        return (MethodSpec(schema=ARGUMENTS, parameters=tuple(ARGUMENTS["properties"])),)

    def is_generator(self, method: str) -> bool:
        """Always False."""
        return False


def sandbox_declaration(app: DeclaredApp, options: Mapping[str, Any]) -> SandboxDeclaration:
    """Return the declaration of a sandbox in `app`. Raises InvalidInput, NotSupported."""
    for name in options:
        if name not in OPTIONS:
            _refuse(name)
    given = {name: value for name, value in options.items() if value is not None}
    settled = resolve_options({**_BASE, **given}, concurrent=None)
    module, name = ENTRY
    return SandboxDeclaration(
        app=app.name,
        name=str(settled.name),
        raw=DeclarationSite(name, module, ""),
        kind=FunctionKind.FUNCTION,
        image=settled.image if settled.has_image else app.image,
        weights=(),
        secrets=(*app.secrets, *settled.secrets),
        volumes=settled.volumes,
        env=app.env,
        resources=settled.resources,
        scaling=settled.scaling,
        clocks=settled.clocks,
        snapshot=settled.snapshot,
        idempotent=False,
        description=settled.description,
        access=(),
        priority=None,
        tags={**app.tags, **settled.tags},
        policies=settled.policies,
    )


def _refuse(name: str) -> NoReturn:
    for known in (f"Sandbox.create({name}=…)", f"{name}="):
        if is_unsupported(known):
            raise not_supported(known)
    raise InvalidInput(
        f"Sandbox.create({name}=…): unknown option; known: {', '.join(sorted(OPTIONS))}",
        parameter=name,
    )

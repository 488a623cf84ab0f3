"""`Binding`: the arguments of an object, and the options of a handle, for which the platform has
instances of their own (`pilotlight.spec.bound`).

The platform makes a bound function when it is first asked for it, and says its name. Names are kept
in the process, and asked for again when the platform no longer has such a function: after a
deploy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from pilotlight.client import sessions
from pilotlight.errors import InvalidInput
from pilotlight.sdk.binding.parameters import Parameter, encode_arguments
from pilotlight.sdk.options import resolve_options
from pilotlight.spec.record_json import to_json

_names: dict[tuple[Any, ...], str] = {}
"""Profile, app, function and binding → name. Each change is one atomic operation on the dict."""

_FIELDS: Mapping[str, Mapping[str, str]] = {
    "resources": {"cpu": "cpu", "memory": "memory_bytes"},
    "scaling": {
        "max_instances": "max_instances",
        "max_containers": "max_instances",
        "buffer_instances": "buffer_instances",
        "buffer_containers": "buffer_instances",
    },
    "clocks": {
        "timeout": "execution_s",
        "startup_timeout": "startup_s",
        "queue_timeout": "queue_s",
    },
}
_CHOOSABLE = frozenset(
    {"gpu", "scaledown_window", "waiting_cost", "env", "secrets", "retries"}
    | {"region", "cloud", "routing_region"}
    | {name for fields in _FIELDS.values() for name in fields}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """What a handle is bound to: JSON arguments of the class, and options as fields of a spec."""

    arguments: Mapping[str, Any]
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        title: str,
        parameters: Mapping[str, Parameter] | None,
        arguments: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
    ) -> Binding | None:
        """Return the binding of an object; None for the declared class itself. `parameters`: None =
        of a class that is only known by name. Raises InvalidInput."""
        found = encode_arguments(title, parameters, arguments)
        known = parameters or {}
        is_default = all(
            name in known and known[name].has_default and known[name].default == arguments[name]
            for name in arguments
        )
        return None if is_default and not options else cls(found, options or {})

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())

    def forget(self, app: str, function: str) -> bool:
        """Ask for the name again at the next call; returns whether it was known."""
        return _names.pop(self._key(app, function), None) is not None

    def name(self, app: str, function: str) -> str:
        """Return the name of the bound function. Raises what the platform answers."""
        key = self._key(app, function)
        if key not in _names:
            _names[key] = sessions.client().bind(app, function, self.arguments, self.options)
        return _names[key]

    async def name_aio(self, app: str, function: str) -> str:
        """Asynchronous form of `name`."""
        key = self._key(app, function)
        if key not in _names:
            client = await sessions.async_client()
            _names[key] = await client.bind(app, function, self.arguments, self.options)
        return _names[key]

    def _key(self, app: str, function: str) -> tuple[Any, ...]:
        text = json.dumps([self.arguments, self.options], sort_keys=True)
        return sessions.current_profile(), app, function, text


def bound_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `Cls.with_options` as the fields of a spec that they replace. Raises
    InvalidInput naming one that cannot be chosen by a caller."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in _CHOOSABLE:
            known = sorted(_CHOOSABLE - {"region", "cloud", "routing_region"})
            raise InvalidInput(
                f"with_options({name}=…): is declared with the class; of a handle you can choose "
                f"{', '.join(known)}",
                parameter=name,
            )
    settled = resolve_options(given, concurrent=None)
    found: dict[str, Any] = {}
    for record, fields in _FIELDS.items():
        values = {f: getattr(getattr(settled, record), f) for n, f in fields.items() if n in given}
        if values:
            found[record] = values
    if "gpu" in given:
        resources = settled.resources
        found.setdefault("resources", {}).update(
            gpu=list(resources.gpu), gpu_count=resources.gpu_count
        )
    if "scaledown_window" in given:
        scaling = settled.scaling
        found.setdefault("scaling", {}).update(
            scaledown_window_s=scaling.scaledown_window_s, waiting_cost=scaling.waiting_cost
        )
    if "env" in given:
        found["env"] = dict(settled.env)
    if "retries" in given:
        found["retries"] = to_json(settled.policies["retries"])
    if "secrets" in given:
        found["secrets"] = [_stored(secret) for secret in settled.secrets]
    return found


def merged(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of two `with_options` in a row."""
    both = dict(before)
    for name, value in after.items():
        earlier = both.get(name)
        if isinstance(value, Mapping) and isinstance(earlier, Mapping) and name != "retries":
            both[name] = {**earlier, **value}
        else:
            both[name] = value
    return both


def _stored(secret: Any) -> str:
    if secret.values is not None:
        raise InvalidInput(
            "with_options(secrets=…): name stored secrets, Secret.from_name(…); values are "
            "uploaded by a deploy only",
            parameter="secrets",
        )
    return str(secret.stored_name(""))

"""The launcher's input: environment variables, and the launch document that one of them names or,
in a warm pod, its promotion brings.

Secrets arrive as environment variables, or with the promotion. They are removed here, so that the
booting worker does not see them: it receives them when it becomes an instance, exactly as on a
single machine."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from pilotlight.core.transport.calls_socket import CALLS_VARIABLE, POD_CALLS_SOCKET
from pilotlight.protocol import POD_CONTROL_PORT
from snapshotter.types import LaunchSpec

LISTEN = "0.0.0.0:8080"
"""Address on which the worker serves, also for readiness probes."""
CONTROL = f"0.0.0.0:{POD_CONTROL_PORT}"
"""Address of a warm pod's control port (`control_port`)."""
BAKED = Path("/opt/pilotlight")
"""Directory of the code in an image that contains it: `code/`, and the bundle's digest in
`bundle.sha256`."""
OURS = (
    "PILOTLIGHT_LAUNCH",
    "PILOTLIGHT_NODE",
    "PILOTLIGHT_WORK",
    "PILOTLIGHT_LISTEN",
    "PILOTLIGHT_BAKED",
    "PILOTLIGHT_WARM",
    "PILOTLIGHT_CONTROL",
    "PILOTLIGHT_POD",
    "PILOTLIGHT_NAMESPACE",
)
"""Variables for the launcher that are not passed to the worker."""


class InvalidPod(Exception):
    """Raised when the pod lacks what the launcher needs; the message names the variable or file."""


@dataclass(frozen=True, kw_only=True)
class PodPlace:
    """What a pod has whatever it runs, read once at the start.

    Attributes:
        node: directory in which the node agent provides files; it may be empty. work: the only
        directory that is written to. host, port: where the worker listens. pod: the pod's name,
        which is the instance id. env: variables that the worker inherits: all but secrets and those
        of the launcher. gpus: UUIDs or indices of the GPUs that the device plugin assigned; () if
        unknown. control: host and port of a warm pod's control port; None: it is not a warm pod.
    """

    node: Path
    work: Path
    host: str
    port: int
    pod: str
    namespace: str
    env: Mapping[str, str]
    gpus: tuple[str, ...] = ()
    control: tuple[str, int] | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> PodPlace:
        """Parse `environ`. Raises InvalidPod."""
        host, port = _address("PILOTLIGHT_LISTEN", environ.get("PILOTLIGHT_LISTEN", LISTEN))
        control = _address("PILOTLIGHT_CONTROL", environ.get("PILOTLIGHT_CONTROL", CONTROL))
        return PodPlace(
            node=_path(environ, "PILOTLIGHT_NODE"),
            work=_path(environ, "PILOTLIGHT_WORK"),
            host=host,
            port=port,
            pod=environ.get("PILOTLIGHT_POD") or environ.get("HOSTNAME") or socket.gethostname(),
            namespace=environ.get("PILOTLIGHT_NAMESPACE", ""),
            env={name: value for name, value in environ.items() if name not in OURS},
            gpus=_gpus(environ.get("NVIDIA_VISIBLE_DEVICES", "")),
            control=control if is_warm(environ) else None,
        )


@dataclass(frozen=True, kw_only=True)
class PodEnvironment(PodPlace):
    """A pod that knows what it runs.

    Attributes:
        launch: what to run. secrets: variables for the instance. baked: directory of the code in
        the image (BAKED); None: there is none.
    """

    launch: LaunchSpec
    secrets: Mapping[str, str]
    baked: Path | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> PodEnvironment:
        """Parse `environ`. Raises InvalidPod."""
        launch = _launch(_path(environ, "PILOTLIGHT_LAUNCH"))
        if missing := [name for name in launch.secret_variables if name not in environ]:
            raise InvalidPod(
                f"the secret variables {', '.join(missing)} are not set: check that the pod's "
                f"envFrom names their Secret"
            )
        baked = Path(environ.get("PILOTLIGHT_BAKED") or BAKED)
        return cls.at(PodPlace.of(environ), launch, environ, baked=baked)

    @classmethod
    def at(
        cls,
        place: PodPlace,
        launch: LaunchSpec,
        secrets: Mapping[str, str],
        *,
        baked: Path | None = None,
    ) -> PodEnvironment:
        """`launch` in a pod. `secrets`: variables, of which those that the launch names are used.
        Raises InvalidPod that names the missing ones."""
        values = {field.name: getattr(place, field.name) for field in fields(PodPlace)}
        wanted = launch.secret_variables
        if missing := [name for name in wanted if name not in secrets]:
            raise InvalidPod(f"the secret variables {', '.join(missing)} are missing")
        values["env"] = {name: value for name, value in place.env.items() if name not in wanted}
        return cls(
            **values,
            launch=launch,
            secrets={name: secrets[name] for name in wanted},
            baked=baked,
        )

    def calls_env(self) -> dict[str, str]:
        """The variable by which the worker finds the socket to call other functions; none for a
        function without a network."""
        if self.launch.offline:
            return {}
        return {CALLS_VARIABLE: str(self.node / POD_CALLS_SOCKET)}

    def baked_code(self) -> Path | None:
        """The code in the image, if it is that of this launch; else None."""
        if self.baked is None:
            return None
        try:
            digest = (self.baked / "bundle.sha256").read_text().split()[:1]
        except (OSError, UnicodeDecodeError):
            return None
        code = self.baked / "code"
        return code if digest == [self.launch.bundle] and code.is_dir() else None


def is_warm(environ: Mapping[str, str]) -> bool:
    """Whether this is a warm pod, whose launch document comes with its promotion."""
    return environ.get("PILOTLIGHT_WARM") == "1"


def _gpus(visible: str) -> tuple[str, ...]:
    """Parse NVIDIA_VISIBLE_DEVICES: GPU names, or `all`, `none`, `void` (NVIDIA Container
    Toolkit)."""
    names = tuple(name.strip() for name in visible.split(","))
    return (
        names if all(name.isdigit() or name.startswith(("GPU-", "MIG-")) for name in names) else ()
    )


def _path(environ: Mapping[str, str], name: str) -> Path:
    value = environ.get(name, "")
    if not value.startswith("/"):
        raise InvalidPod(f"{name} = {value!r}: must be an absolute path")
    return Path(value)


def _address(name: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidPod(f"{name} = {text!r}: must be host:port")
    return host.strip("[]"), int(port)


def _launch(file: Path) -> LaunchSpec:
    try:
        return LaunchSpec.from_json(json.loads(file.read_bytes()))
    except OSError as e:
        raise InvalidPod(f"the launch document {file} cannot be read: {e.strerror or e}") from e
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise InvalidPod(
            f"the launch document {file} is invalid or of another platform version: {e}"
        ) from e

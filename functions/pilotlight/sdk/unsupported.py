"""Modal's names that this SDK does not have: one error, and one table that says for each name what
to use instead. docs/reference/modal.md has the same table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn, TypeVar

from pilotlight.errors import InvalidInput

T = TypeVar("T")


class NotSupported(InvalidInput, AttributeError):
    """Raised when a name of Modal's is used that pilotlight does not have; `detail` has
    `parameter`, the name. Also an AttributeError, so that `hasattr` says False."""


_STORAGE = "pilotlight.Weights for model files, pilotlight.Volume for other data"
_PUBLIC = "Image.from_registry(…) of a public image"
_EPHEMERAL = "{0}.from_name(name, create_if_missing=True), and {0}.delete(name) at the end"
_SERVER = "@pilotlight.web_server(…)"
_STEPS = "Image.python(…) with .pip_install(…), .apt_install(…) and .run(…)"

NOT_HERE: Mapping[str, str] = {
    "NetworkFileSystem": _STORAGE,
    "network_file_systems=": _STORAGE,
    "CloudBucketMount": "pilotlight.Weights('s3://…') to read, boto3 to write",
    "Mount": "Image.copy(…); the app's directory is packaged without it",
    "Stub": "App",
    "gpu": 'gpu="H100" or gpu="H100:2", a string',
    "Proxy": "network= and egress=, and the operator's own proxy",
    "proxy=": "network= and egress=, and the operator's own proxy",
    "Tunnel": _SERVER,
    "forward": _SERVER,
    "interact": "pilotlight instance logs, and f.local(…) for a debugger",
    "Environment": "pilotlight environment create, and -e",
    "Workspace": "pilotlight tenant",
    "billing": "pilotlight billing",
    "SchedulerPlacement": "the labels of nodes, which the operator sets",
    "Server": _SERVER,
    "App.server": "@app.cls() with @pilotlight.web_server(…)",
    "SandboxSnapshot": "snapshots of functions, which are made without being asked for",
    "Probe": "objectives=pilotlight.Objectives(…)",
    "experimental": "what it would import is not there; gpu= takes several GPUs of one machine",
    "i6pn=": "gpu='H100:8' on one machine: functions have no network of their own",
    "restrict_modal_access=": "network='none'",
    "max_inputs=": "@pilotlight.concurrent(max_inputs=…) for calls at once",
    "custom_domains=": "a reverse proxy in front of the platform",
    "label=": "name= of @app.function()",
    "detach=": "app.deploy(), and f.spawn(…)",
    "environment_name=": "PILOTLIGHT_ENVIRONMENT, or pilotlight -e",
    "client=": "a pilotlight.Profile, which the environment or `pilotlight login` sets",
    "Function.update_autoscaler": "scaling_schedule=, or pilotlight app deploy",
    "Function.get_current_stats": "pilotlight top",
    "Function.with_batching": "@pilotlight.batched(…)",
    "Function.logs": "pilotlight logs",
    "Cls.with_batching": "@pilotlight.batched(…)",
    "FunctionCall.get_call_graph": "pilotlight trace",
    "FunctionCall.num_inputs": "the list that f.spawn_map(…) returns",
    "FunctionCall.iter": "the list that f.spawn_map(…) returns",
    "Image.run_function": "pilotlight.Weights for model files, .run('python -c …') for the rest",
    "Image.from_id": "the Image object: equal images are built once",
    "Image.from_name": "the Image object: equal images are built once",
    "Image.from_scratch": _STEPS,
    "Image.from_aws_ecr": _PUBLIC,
    "Image.from_gcp_artifact_registry": _PUBLIC,
    "Image.micromamba": ".pip_install(…) and .apt_install(…)",
    "Image.micromamba_install": ".pip_install(…) and .apt_install(…)",
    "Image.conda": ".pip_install(…) and .apt_install(…)",
    "Image.dockerfile_commands": ".run(…), .env(…) and .copy(…)",
    "Image.entrypoint": "@pilotlight.enter()",
    "Image.cmd": "@pilotlight.enter()",
    "Image.shell": ".run('bash -c …')",
    "Image.workdir": "os.chdir(…) in @pilotlight.enter()",
    "Image.pip_install_private_repos": ".pip_install(…, extra_options=…) with a URL",
    "Image.poetry_install_from_file": ".pip_install_from_requirements(…)",
    "Image.uv_sync": ".pip_install_from_requirements(…), from `uv export`",
    "Image.publish": "the Image object: equal images are built once",
    "Image.…(ignore=…)": "a directory without those files",
    "FilePatternMatcher": "a directory without those files",
    "Image.…(env=…)": ".env(…), which is for all later steps",
    "Image.…(force_build=…)": "another version or command in the step: equal steps are built once",
    "Image.…(gpu=…)": "what needs a GPU in @pilotlight.enter(), whose snapshot keeps the result",
    "Image.…(volumes=…)": _STORAGE,
    "Image.…(secrets=…)": ".env(…) for what is not secret, a wheel in .copy(…) for the rest",
    "Secret.objects": "pilotlight secret list",
    "Dict.objects": "pilotlight dict list",
    "Dict.ephemeral": _EPHEMERAL.format("Dict"),
    "Queue.iterate": "Queue.get(…) in a loop, which removes what it returns",
    "Queue.objects": "pilotlight queue list",
    "Queue.ephemeral": _EPHEMERAL.format("Queue"),
    "partition_ttl=": "values stay until they are taken, or cleared",
    "Sandbox.from_name": "Sandbox.from_id(…)",
    "Sandbox.reload_volumes": "another sandbox: it begins with the newest commit",
    "Sandbox.set_tags": "tags= of Sandbox.create, which are those of bills",
    "Sandbox.snapshot_filesystem": "sandbox.open(…) to copy files out, an Image for what all need",
    "Sandbox.tunnels": _SERVER,
    "Sandbox.create(gpu=…)": "@app.function(gpu=…)",
    "Sandbox.create(name=…)": "the sandbox's object_id",
    "cidr_allowlist=": "block_network=True, or egress= for private networks",
    "encrypted_ports=": _SERVER,
    "h2_ports=": _SERVER,
    "unencrypted_ports=": _SERVER,
    "pty=": "pipes: stdin, stdout and stderr of the command",
    "Period(months=…)": 'Cron("0 0 1 * *")',
    "Period(years=…)": 'Cron("0 0 1 1 *")',
}
"""Names that are not here, with the way out."""


def is_unsupported(name: str) -> bool:
    """Whether the table has this name."""
    return name in NOT_HERE


def not_supported(name: str) -> NotSupported:
    """Return the error for a name of the table."""
    text = f"{name} is not supported: use {NOT_HERE[name]} (docs/reference/modal.md)"
    return NotSupported(text, parameter=name)


class _Refused:
    """An attribute that raises NotSupported where it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise not_supported(self._name)


def refuse_attributes(kind: type[T]) -> type[T]:
    """Decorate a class of the SDK: using an attribute that the table has as `Class.attribute`
    raises NotSupported."""
    for name in NOT_HERE:
        owner, dot, attribute = name.partition(".")
        if dot and owner == kind.__name__ and attribute.isidentifier():
            setattr(kind, attribute, _Refused(name))
    return kind


def refuse(options: Iterable[str], where: str) -> None:
    """Raise NotSupported for the first option of Modal's, InvalidInput for another one."""
    for name in options:
        if is_unsupported(f"{name}="):
            raise not_supported(f"{name}=")
        raise InvalidInput(f"{where}({name}=…): unknown option", parameter=name)

"""`pilotlight render`: print the Kubernetes manifests of an app."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.apps.deploy_progress import load_user_app
from pilotlight.cli.core.command import command
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput, PilotlightError
from pilotlight.spec.identifiers import DEFAULT_ENVIRONMENT

if TYPE_CHECKING:
    from pilotlight.client.client import Client
    from pilotlight.kubernetes.cluster import Cluster
    from pilotlight.kubernetes.errors import FieldProblem
    from pilotlight.kubernetes.manifests.labels import Manifest
    from pilotlight.kubernetes.manifests.tenant_namespace import Tenancy
    from pilotlight.kubernetes.settings import ClusterSettings
    from pilotlight.packaging.app import App
    from pilotlight.spec.function import FunctionSpec

_DEFAULT_TENANT = "tenant"


def register(root: typer.Typer) -> None:
    """Add the command."""
    command(root, "render")(render)


@dataclass(slots=True)
class _Sheaf:
    """Result of one run: the manifests of each file, problems, cluster requirements, and notes."""

    files: dict[str, list[Manifest]] = field(default_factory=dict)
    problems: list[FieldProblem] = field(default_factory=list)
    needs: list[FieldProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def manifests(self) -> list[Manifest]:
        """All of them, in the order of application."""
        return [one for those in self.files.values() for one in those]

    @property
    def services(self) -> list[Manifest]:
        """The functions' Knative Services."""
        return [one for one in self.manifests if one["kind"] == "Service"]


def render(
    session: Session,
    *,
    file: Annotated[
        str, typer.Argument(metavar="FILE[::APP]", help="app.py, app.py::name, or package.module.")
    ],
    tenant: Annotated[
        str | None,
        typer.Option(help="Name of the tenant, from which the namespace's name is derived."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="Namespace. Default: derived from tenant and environment."),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(help="Image of all functions, by digest. Default: from platform.yaml."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Directory to write to: one file for the namespace and one per function. Default: "
            "print the manifests."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Report which features of Knative the cluster must enable."),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Like --check, but features that the cluster must enable are errors.",
        ),
    ] = False,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Have the cluster validate the Services (dry run)."),
    ] = False,
) -> None:
    """Print the manifests that would be applied for an app in a cluster.

    Nothing is uploaded, and no running platform is needed. Secrets are shown without values.
    Placeholders replace the ids that only the platform assigns, and the number of the next
    revision."""
    app = load_user_app(file)
    settings = _settings(session, image)
    sheaf = _Sheaf()
    tenancy = _tenancy(session, settings, tenant=tenant, namespace=namespace, sheaf=sheaf)
    specs = _with_images(_specs(session, app, sheaf), tenancy, image=image, sheaf=sheaf)
    _collect(app, tenancy, specs, sheaf)
    if cluster:
        _dry_run(sheaf, settings)
    elif check or strict:
        _check(sheaf, settings, strict=strict)
    if output is not None:
        _write(sheaf, output)
    _show(session, sheaf, output)
    if sheaf.problems:
        raise InvalidInput(
            f"Knative would reject {len(sheaf.problems)} fields: "
            f"{'; '.join(str(problem) for problem in sheaf.problems)}",
            hint="Correct the function, platform.yaml or the cluster's settings, as each problem "
            "says.",
        )


def _settings(session: Session, image: str | None) -> ClusterSettings:
    """Section `cluster` of platform.yaml; if `image` is given, it replaces all images."""
    from pilotlight.core.settings import load_section as read
    from pilotlight.kubernetes.settings import ClusterSettings

    settings = read(ClusterSettings, "cluster", session.platform().config)
    if image is None:
        return settings
    try:
        return replace(
            settings,
            runtime_image=image,
            images={"vllm": image, **dict.fromkeys(settings.images, image)},
        )
    except ValueError as e:
        raise InvalidInput(f"--image: {e}", parameter="image") from e


def _tenancy(
    session: Session,
    settings: ClusterSettings,
    *,
    tenant: str | None,
    namespace: str | None,
    sheaf: _Sheaf,
) -> Tenancy:
    from pilotlight.core.settings import load_section as read
    from pilotlight.kubernetes.manifests.tenant_namespace import Tenancy
    from pilotlight.packaging.rendering import UNKNOWN_PLATFORM, UNKNOWN_TENANT
    from pilotlight.spec.identifiers import require_name
    from snapshotter.settings import SnapshotterSettings

    uid = read(SnapshotterSettings, "snapshotter", session.platform().config).uid_base
    environment = session.options.environment or DEFAULT_ENVIRONMENT
    name = tenant or _DEFAULT_TENANT
    require_name("tenant", name)
    require_name("environment", environment, parameter="tenant")
    sheaf.notes.append(
        f"placeholders: platform id {UNKNOWN_PLATFORM}, tenant id {UNKNOWN_TENANT} and uid {uid}, "
        f"which the platform assigns; v1 for the next revision number"
    )
    return Tenancy(
        id=UNKNOWN_TENANT,
        name=name,
        uid=uid,
        environment=environment,
        settings=settings,
        platform=UNKNOWN_PLATFORM,
        given=namespace,
    )


def _specs(session: Session, app: App, sheaf: _Sheaf) -> tuple[FunctionSpec, ...]:
    """The specs that a deploy would create. The manifests of named weights are read from the
    platform if it is reachable."""
    from pilotlight.packaging.build import build

    asked: list[Client] = []

    def stand_in(weights: str, why: Exception) -> str:
        sheaf.notes.append(
            f"weights {weights!r} cannot be read ({why}): their manifest and the revision's name "
            f"are placeholders"
        )
        return hashlib.sha256(f"pilotlight weights {weights}".encode()).hexdigest()

    def named(weights: str) -> str:
        try:
            if not asked:
                asked.append(session.client())
            return asked[0].get_weights(weights).manifest
        except (PilotlightError, OSError) as e:
            return stand_in(weights, e)

    try:
        with build(app, named=named, unread=stand_in) as built:
            return built.functions
    finally:
        for client in asked:
            client.close()


def _with_images(
    specs: Sequence[FunctionSpec], tenancy: Tenancy, *, image: str | None, sheaf: _Sheaf
) -> list[FunctionSpec]:
    """`specs` with the container images that a deploy would push, whose digests are not known."""
    from pilotlight.kubernetes.names import tenant_repository
    from pilotlight.packaging.rendering import UNKNOWN_DIGEST

    registry = tenancy.settings.registry
    if image is None and registry is not None:
        image = f"{tenant_repository(registry, tenancy.name)}@{UNKNOWN_DIGEST}"
        if any(spec.image is not None for spec in specs):
            sheaf.notes.append(
                "placeholders: digests of images, which `pilotlight deploy` makes and pushes"
            )
    return [spec if spec.image is None else replace(spec, container_image=image) for spec in specs]


def _collect(app: App, tenancy: Tenancy, specs: Sequence[FunctionSpec], sheaf: _Sheaf) -> None:
    from pilotlight.packaging import rendering

    sheaf.files["namespace"] = rendering.render_namespace(tenancy, specs)
    for spec in specs:
        made = rendering.render_function(app.name, spec, tenancy)
        sheaf.files[made.manifests[-1]["metadata"]["name"]] = list(made.manifests)


def _check(sheaf: _Sheaf, settings: ClusterSettings, *, strict: bool) -> None:
    """Find what the Services need and Knative's default settings lack: requirements, or problems if
    `strict`."""
    from pilotlight.kubernetes.manifests.knative_features import requirements

    needs = (
        need
        for service in sheaf.services
        for need in requirements(service, knative_namespace=settings.knative_namespace)
    )
    (sheaf.problems if strict else sheaf.needs).extend(dict.fromkeys(needs))


def _dry_run(sheaf: _Sheaf, settings: ClusterSettings) -> None:
    """Have the configured cluster validate the Services without storing them. Raises
    InvalidInput."""
    import asyncio

    from pilotlight.kubernetes.cluster import Cluster
    from pilotlight.kubernetes.errors import ClusterError, FieldProblem, Invalid, ManifestWarned

    async def validate() -> None:
        async with await Cluster.connect(settings) as cluster:
            for service in sheaf.services:
                try:
                    await cluster.apply(await _deployable(service, cluster), dry_run=True)
                except Invalid as e:
                    sheaf.problems.extend(e.problems or [FieldProblem("", str(e))])
                except ManifestWarned as e:
                    sheaf.problems.extend(FieldProblem("", text) for text in e.warnings)

    try:
        asyncio.run(validate())
    except ClusterError as e:
        raise InvalidInput(
            f"the cluster cannot validate the manifests: {e}",
            hint="`pilotlight doctor --cluster` shows what is missing.",
        ) from e


async def _deployable(service: Manifest, cluster: Cluster) -> Manifest:
    """The Service as it can be validated before the app is deployed: in a namespace that exists,
    and without the name of its revision, whose number is a placeholder here."""
    from pilotlight.kubernetes import kinds

    template = service["spec"]["template"]
    unnamed = {key: value for key, value in template["metadata"].items() if key != "name"}
    metadata = service["metadata"]
    if await cluster.get(kinds.NAMESPACE, metadata["namespace"]) is None:
        metadata = {**metadata, "namespace": "default"}
    spec = {**service["spec"], "template": {**template, "metadata": unnamed}}
    return {**service, "metadata": metadata, "spec": spec}


def _write(sheaf: _Sheaf, directory: Path) -> None:
    from pilotlight.kubernetes.manifests.yaml_text import to_yaml

    directory.mkdir(parents=True, exist_ok=True)
    for name, manifests in sheaf.files.items():
        (directory / f"{name}.yaml").write_text(to_yaml(manifests))


def _show(session: Session, sheaf: _Sheaf, output: Path | None) -> None:
    from pilotlight.kubernetes.manifests.yaml_text import to_yaml

    if session.is_json:
        problems = {
            name: [_as_json(one) for one in those]
            for name, those in (("problems", sheaf.problems), ("needs", sheaf.needs))
        }
        print(
            json.dumps(
                {"manifests": sheaf.manifests, "notes": sheaf.notes, **problems}, ensure_ascii=False
            ),
            flush=True,
        )
        return
    if output is None:
        print(to_yaml(sheaf.manifests), end="", flush=True)
    else:
        session.say(f"wrote {', '.join(f'{name}.yaml' for name in sheaf.files)} to {output}")
    for note in sheaf.notes:
        session.say(f"note: {note}")
    for need in sheaf.needs:
        session.say(f"the cluster must provide: {need}")


def _as_json(problem: FieldProblem) -> dict[str, Any]:
    return {"field": problem.field, "message": problem.message, "fix": problem.fix}

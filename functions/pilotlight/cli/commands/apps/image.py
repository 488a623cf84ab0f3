"""`pilotlight image …`: manage built environments, and make container images of functions: for the
registry of a cluster, or in a directory. Neither needs a container engine or privileges."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.apps.deploy import File
from pilotlight.cli.commands.apps.deploy_progress import load_user_app
from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import format_bytes, format_table
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from pilotlight.packaging.app import App
    from pilotlight.packaging.build import Packed
    from pilotlight.packaging.oci.environment import Environment
    from pilotlight.packaging.oci.export import ExportResult
    from pilotlight.sdk.declaration import Declaration


Base = Annotated[
    Path | None,
    typer.Option(help="OCI layout of a base image that provides the system and interpreter."),
]
Venv = Annotated[
    Path | None,
    typer.Option(help="Virtual environment to use instead of the function's Image."),
]


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "image",
        "Manage the built environments of functions, and export functions as container images.",
        {"list": list_, "delete": delete, "push": push, "export": export},
    )


def list_(session: Session) -> None:
    """List the images that your tenant has built, and the functions that use them.

    Their size counts towards stored_bytes of your plan.
    """
    rows = session.request(lambda client: client.images())
    columns = {
        "digest": "image",
        "size_bytes": "size",
        "build_cpu_s": "build CPU s",
        "created_at": "built",
        "functions": "functions",
    }
    shown = [{**row, "digest": row["digest"][:12]} for row in rows]
    session.show(
        rows,
        lambda: format_table(
            shown, columns, empty="No images yet. Deploy a function that declares an Image."
        ),
    )


def delete(
    session: Session,
    digest: Annotated[
        str,
        typer.Argument(
            metavar="DIGEST",
            help="Digest or its first digits, as shown by `pilotlight image list`.",
        ),
    ],
    yes: Yes = False,
) -> None:
    """Delete an image that no revision uses from the node and from the platform's store."""
    with session.client() as client:
        found = [
            row["digest"] for row in client.images() if row["digest"].startswith(digest.lower())
        ]
        if len(found) != 1:
            text = (
                f"{len(found)} images begin with {digest!r}"
                if found
                else f"there is no image {digest!r}"
            )
            raise NotFound(text, hint="List images with `pilotlight image list`.")
        session.confirm(f"Delete image {found[0][:12]}?", yes=yes)
        client.delete_image(found[0])
    session.show({"digest": found[0], "deleted": True}, lambda: f"image {found[0][:12]} is deleted")


def push(
    session: Session,
    *,
    file: File,
    name: Annotated[
        str | None, typer.Option(help="Name that the app is deployed under, if not its own.")
    ] = None,
    function: Annotated[
        str | None, typer.Option(help="Push the image of this function only. Default: of all.")
    ] = None,
    base: Base = None,
    venv: Venv = None,
) -> None:
    """Make the images of an app's functions and push them to the registry of the cluster.

    `pilotlight deploy` does it for images that are not there yet. Use this command to make one
    anew: with a base image, from a virtual environment, or when the registry has lost it. Your own
    login to the registry is used. The next deploy takes what was pushed last."""
    from pilotlight.cli.commands.apps.deploy_progress import Deployer
    from pilotlight.packaging.build import copies_of, pack_images
    from pilotlight.packaging.container_images import push_image

    app = load_user_app(file)
    chosen = [find_function(app, function)] if function else list(app.declarations.values())
    images, blobs = pack_images(app, chosen)
    if venv is not None and len(images) > 1:
        raise InvalidInput(
            f"{app.name} has {len(images)} images, and --venv is the content of one",
            hint="Name the function with --function.",
            parameter="venv",
        )
    pushed = {}
    with session.client() as client, Deployer(session, client).progress() as report:
        for digest, spec in images.items():
            repository = client.container_image(name or app.name, digest)["repository"]
            if repository is None:
                raise InvalidInput(
                    f"{client.profile.url} builds images itself: it has no registry",
                    hint="Run `pilotlight deploy`.",
                )
            pushed[digest] = push_image(
                client,
                name or app.name,
                spec,
                repository=repository,
                copies=copies_of(spec, blobs),
                report=report,
                environ=session.environ,
                base=base,
                venv=venv,
            )
    session.show(
        {"images": pushed},
        lambda: (
            "\n".join(f"{digest[:12]}  {reference}" for digest, reference in pushed.items())
            or f"{app.name} has no functions with an Image"
        ),
    )


def export(
    session: Session,
    *,
    file: File,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Directory for the OCI image layout; created if missing."
        ),
    ],
    function: Annotated[
        str | None, typer.Option(help="Function to export, if the app has several.")
    ] = None,
    base: Base = None,
    venv: Venv = None,
    tag: Annotated[
        str, typer.Option(help="Tag of the image in the layout, for the copying tool.")
    ] = "latest",
) -> None:
    """Export a function's code, its environment and the launcher as an OCI image layout.

    The output is reproducible. Without --base, the image contains the interpreter and all shared
    libraries of this machine. A function's Image must already be built on this machine: `pilotlight
    deploy` builds it. The image runs also where no node agent is, since it contains the code.
    skopeo, crane and oras copy the layout to a registry, such as that of cluster.runtime_image; the
    image of a function with an Image comes to its cluster by `pilotlight deploy`."""
    from pilotlight.packaging.build import pack_function
    from pilotlight.packaging.oci.export import FunctionCode, source_date_epoch
    from pilotlight.packaging.oci.export import export_image as write
    from pilotlight.packaging.source import find_source_tree

    app = load_user_app(file)
    declaration = find_function(app, function)
    _check_outside(output, find_source_tree(declaration).root)
    packed = pack_function(app, declaration)
    environment = _environment(session, packed, venv, has_base=base is not None)
    code = FunctionCode(
        bundle=packed.bundle, digest=packed.bundle_digest, app=app.name, function=declaration.name
    )
    epoch_s = source_date_epoch(session.environ)
    done = write(
        code,
        environment,
        output,
        base=base,
        tag=tag,
        epoch_s=epoch_s,
        say=lambda what: session.say(f"writing {what}"),
    )
    session.show(report(done, packed), lambda: _describe(done, packed))


def find_function(app: App, name: str | None) -> Declaration:
    """The named function, or the only one. Raises NotFound or InvalidInput."""
    names = ", ".join(app.declarations) or "none"
    if name is None:
        if len(app.declarations) != 1:
            raise InvalidInput(
                f"{app.name} has {len(app.declarations)} functions: {names}",
                hint="Name one with --function.",
            )
        return next(iter(app.declarations.values()))
    if name not in app.declarations:
        raise NotFound(f"{app.name} has no function {name!r}; it has: {names}")
    return app.declarations[name]


def report(done: ExportResult, packed: Packed) -> dict[str, Any]:
    """Format the result as JSON. `setting`: the key of platform.yaml for the image of a function
    without an Image."""
    return {
        "digest": done.digest,
        "output": str(done.output),
        "bundle": packed.bundle_digest,
        "image": packed.image_digest,
        "setting": "cluster.runtime_image" if packed.image_digest is None else None,
        "size_bytes": done.size_bytes,
        "layers": [
            {"title": layer.title, "digest": layer.digest, "size_bytes": layer.size_bytes}
            for layer in done.layers
        ],
        "missing_libraries": dict(done.missing),
    }


def _check_outside(output: Path, source: Path | None) -> None:
    if source is not None and output.resolve().is_relative_to(source.resolve()):
        raise InvalidInput(
            f"{output} is inside the function's source: every deploy would include it",
            hint=f"Choose a directory outside {source}.",
            parameter="output",
        )


def _environment(
    session: Session, packed: Packed, venv: Path | None, *, has_base: bool
) -> Environment:
    from pilotlight.packaging.container_images import check_packages
    from pilotlight.packaging.oci import environment as places

    if packed.image is not None:
        check_packages(packed.image, has_base=has_base)
    if venv is not None:
        return places.virtual_environment(venv)
    if packed.image_digest is None:
        return places.own_environment()
    return places.built_environment(session.platform().paths.home, packed.image_digest)


def _describe(done: ExportResult, packed: Packed) -> str:
    lines = [
        f"{done.digest}",
        f"  {done.output}: {len(done.layers)} layers, {format_bytes(done.size_bytes)}",
    ]
    lines += [
        f"  library {name}, required by {by}, is not on this machine"
        for name, by in done.missing.items()
    ]
    if packed.image_digest is None:
        lines.append(
            f"Copy the image to your registry, and set cluster.runtime_image of platform.yaml to "
            f"<registry>/<name>@{done.digest}"
        )
    return "\n".join(lines)

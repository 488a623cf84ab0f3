"""`pilotlight image …`: manage built environments, and export functions as container images.

`image export` writes to a directory. It needs no container engine, registry or privileges.
"""

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
    from pilotlight.packaging.build import Packed
    from pilotlight.packaging.oci.environment import Environment
    from pilotlight.packaging.oci.export import ExportResult
    from pilotlight.sdk.app import App
    from pilotlight.sdk.declaration import Declaration


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "image",
        "Manage the built environments of functions, and export functions as container images.",
        {"list": list_, "delete": delete, "export": export},
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
    base: Annotated[
        Path | None,
        typer.Option(help="OCI layout of a base image that provides the system and interpreter."),
    ] = None,
    venv: Annotated[
        Path | None,
        typer.Option(help="Virtual environment to use instead of the function's Image."),
    ] = None,
    tag: Annotated[
        str, typer.Option(help="Tag of the image in the layout, for the copying tool.")
    ] = "latest",
) -> None:
    """Export a function's code, its environment and the launcher as an OCI image layout.

    The output is reproducible. Without --base, the image contains the interpreter and all shared
    libraries of this machine. A function's Image must already be built on this machine: `pilotlight
    deploy` builds it. Copy the layout to a registry with skopeo, crane or oras, and set
    cluster.images (or cluster.runtime_image) of platform.yaml to the image, by the printed
    digest."""
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
    session.show(report(done, packed), lambda: _told(done, packed))


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
    """Format the result as JSON. `setting`: the key of platform.yaml for the image."""
    return {
        "digest": done.digest,
        "output": str(done.output),
        "bundle": packed.bundle_digest,
        "image": packed.image_digest,
        "setting": _setting(packed),
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
    from pilotlight.packaging.oci import environment as places

    apt = [
        name
        for step in (packed.image.steps if packed.image else ())
        if step["op"] == "apt"
        for name in step["packages"]
    ]
    if apt and not has_base:
        raise InvalidInput(
            f"the Image installs Debian packages ({', '.join(apt)}), which only a base image can "
            f"provide",
            hint="Pass --base with an OCI layout that contains them.",
            parameter="base",
        )
    if venv is not None:
        return places.virtual_environment(venv)
    if packed.image_digest is None:
        return places.own_environment()
    return places.built_environment(session.platform().paths.home, packed.image_digest)


def _setting(packed: Packed) -> str:
    return (
        "cluster.runtime_image"
        if packed.image_digest is None
        else f"cluster.images.{packed.image_digest}"
    )


def _told(done: ExportResult, packed: Packed) -> str:
    lines = [
        f"{done.digest}",
        f"  {done.output}: {len(done.layers)} layers, {format_bytes(done.size_bytes)}",
    ]
    lines += [
        f"  library {name}, required by {by}, is not on this machine"
        for name, by in done.missing.items()
    ]
    lines.append(
        f"Copy the image to your registry, and set {_setting(packed)} of platform.yaml to "
        f"<registry>/<name>@{done.digest}"
    )
    return "\n".join(lines)

"""`pilotlight weights …`: upload and download models, and manage them on the node."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import (
    format_bytes,
    format_milliseconds,
    format_table,
    format_time,
)
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput, NotFound, PilotlightError
from pilotlight.spec.identifiers import check_name

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pilotlight.client.client import Client
    from pilotlight.client.resources.weights import (
        WeightsInfo,
        WeightsProgress,
        WeightsVerification,
    )
    from pilotlight.packaging.weights_pull import PullResult
    from pilotlight.packaging.weights_push import PushResult
    from weight_cache.manifest import Manifest

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name, as shown by `pilotlight weights list`.")
]
Bar = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""
_COLUMNS = {
    "name": "weights",
    "size_bytes": "size",
    "files": "files",
    "tier": "where",
    "hbm": "GPU",
    "pinned": "pinned",
    "instances": "instances",
    "source": "source",
    "updated_at": "changed",
}
_FILE_COLUMNS = {"path": "file", "size_bytes": "size", "tensors": "tensors"}
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "weights",
        "Manage model weights: uploaded once, mapped by instances, never part of a snapshot.",
        {
            "push": push,
            "pull": pull,
            "list": list_,
            "show": show,
            "verify": verify,
            "prefetch": prefetch,
            "pin": pin,
            "unpin": unpin,
            "delete": delete,
        },
    )


def push(
    session: Session,
    *,
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE…",
            help="A directory, s3://bucket/prefix, hf://org/name@revision, or http(s):// URLs of "
            "files.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="Name on the platform. Default: the last part of the source.")
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            help="Only files that match the pattern, such as '*.safetensors'; may be repeated. "
            "Default: all."
        ),
    ] = None,
) -> None:
    """Upload a model under a name; apps use it with Weights.named(NAME).

    Only data that the platform lacks is sent. This command reads the source with the credentials of
    its environment (HF_TOKEN, AWS_…).
    """
    from pilotlight.cli.commands.apps.deploy_progress import Deployer
    from pilotlight.packaging.weights_push import push_weights as send
    from pilotlight.sdk.storage.weights import Weights

    sources = [
        word if "://" in word else str(session.cwd / Path(word).expanduser()) for word in source
    ]
    declared = Weights(
        sources if len(sources) > 1 else sources[0], name=name, include=tuple(include or ())
    )
    where: Path | list[str] = declared.directory() if declared.is_directory else sources
    _check_name(declared.name)
    with session.client() as client:
        _require_environment(client)
        with Deployer(session, client).progress() as progress:
            pushed = send(
                client,
                where if len(sources) > 1 or isinstance(where, Path) else sources[0],
                name=declared.name,
                include=declared.include,
                progress=progress,
            )
        shown = str(where) if isinstance(where, Path) else declared.source
        info = client.put_weights(declared.name, manifest=pushed.manifest, source=shown)
    session.show(
        {**dataclasses.asdict(info), "uploaded_bytes": pushed.uploaded_bytes},
        lambda: _pushed(info, pushed),
    )


def pull(
    session: Session,
    which: Annotated[
        str, typer.Argument(metavar="NAME|DIGEST", help="A name, or the digest of a manifest.")
    ],
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIRECTORY", help="Directory to write to; created if missing."),
    ],
    yes: Yes = False,
) -> None:
    """Download a model to a local directory and verify every byte.

    Run the same command again to resume an interrupted download.
    """
    from pilotlight.packaging.weights_pull import is_pull_target_empty
    from pilotlight.packaging.weights_pull import pull_weights as bring

    if not is_pull_target_empty(directory):
        session.confirm(
            f"{directory} is not empty. Write the files there and overwrite those of the same name?",
            yes=yes,
        )
    with session.client() as client:
        digest = which if _DIGEST.match(which) else client.get_weights(which).manifest
        with _bar(session, f"pulling {which[:24]}") as bar:
            pulled = bring(client, digest, directory, progress=bar)
    session.show(
        {**dataclasses.asdict(pulled), "directory": str(pulled.directory)}, lambda: _pulled(pulled)
    )


def list_(session: Session) -> None:
    """List the environment's weights and their location: `origin` (the platform's store), or the
    node's `nvme` or `dram`; and the GPUs whose memory has them."""
    found = session.request(lambda client: client.list_weights())
    empty = (
        "No weights yet. Run `pilotlight weights push DIRECTORY`, or declare weights in an app and "
        "deploy it."
    )
    session.show(
        [dataclasses.asdict(info) for info in found],
        lambda: format_table([row_of(info) for info in found], _COLUMNS, empty=empty),
    )


def show(session: Session, name: Name) -> None:
    """Show a model: its source and location, how long a start would wait for it, and its files."""
    from pilotlight.packaging.weights_pull import fetch_manifest

    with session.client() as client:
        info = client.get_weights(name)
        manifest = fetch_manifest(client, info.manifest)
    session.show(
        {**dataclasses.asdict(info), "listing": file_rows(manifest)},
        lambda: _details(info, manifest),
    )


def verify(session: Session, name: Name) -> None:
    """Make the node read its copy of a model and compare it with the model's hashes.

    The exit status is 1 if files are damaged. The node fetches damaged files again when they are
    needed.
    """
    from pilotlight.client.resources.weights import WeightsProgress

    found: WeightsVerification | None = None
    with session.client() as client, _spinner(session, f"verifying {name}") as say:
        for part in client.verify_weights(name):
            if isinstance(part, WeightsProgress):
                say(f"verifying {name} ({part.elapsed_s:.0f} s)")
            else:
                found = part
    if found is None:
        raise PilotlightError(f"the node did not report a result for {name}")
    checked = found
    session.show({"name": name, **dataclasses.asdict(checked)}, lambda: _verdict(name, checked))
    if checked.corrupt:
        raise typer.Exit(1)


def prefetch(session: Session, name: Name) -> None:
    """Fetch a model to the node's disk, so that the next start does not wait for it.

    Starts that need data now have priority.
    """
    info = session.request(
        lambda client: _follow(session, f"fetching {name}", client.prefetch_weights(name))
    )
    session.show(dataclasses.asdict(info), lambda: f"{info.name} is on the node: {_where(info)}")


def pin(session: Session, name: Name) -> None:
    """Fetch a model to the node's disk and never evict it. Needs an admin key.

    A version that is pushed later under the same name is not pinned.
    """
    info = session.request(
        lambda client: _follow(session, f"fetching {name}", client.pin_weights(name))
    )
    session.show(
        dataclasses.asdict(info),
        lambda: f"{info.name} ({format_bytes(info.size_bytes)}) is pinned on the node",
    )


def unpin(session: Session, name: Name) -> None:
    """Unpin a model: the node may evict it when it needs space."""
    info = session.request(lambda client: client.unpin_weights(name))
    session.show(dataclasses.asdict(info), lambda: f"{info.name} is no longer pinned on the node")


def delete(session: Session, name: Name, yes: Yes = False) -> None:
    """Delete weights that no function uses, and free the node's disk."""
    session.confirm(f"Delete weights {name}?", yes=yes)
    session.request(lambda client: client.delete_weights(name))
    session.show({"name": name, "deleted": True}, lambda: f"{name} is deleted")


def row_of(info: WeightsInfo) -> dict[str, Any]:
    """Format a model as a table row."""
    return {
        **dataclasses.asdict(info),
        "pinned": True if info.is_pinned else None,
        "hbm": format_hbm(info),
    }


def format_hbm(info: WeightsInfo) -> str:
    """Format what lies in which GPU: `H100 GPU-1a2b3c4d: 14.9 GiB`; "no GPU" where the node has
    none."""
    if info.hbm is None:
        return "no GPU"
    return ", ".join(
        f"{one['gpu']} {one['uuid'][:12]}: "
        + ("?" if one["bytes"] is None else format_bytes(one["bytes"]))
        + ("" if one["state"] == "delivered" else f" {one['state']}")
        for one in info.hbm
    )


def file_rows(manifest: Manifest) -> list[dict[str, Any]]:
    """Rows for a model's files; `tensors` is the number of tensors in a safetensors file."""
    return [
        {
            "path": f.path,
            "size_bytes": f.size_bytes,
            "digest": f.digest,
            "tensors": len(f.tensors) or None,
        }
        for f in manifest.files
    ]


def _check_name(name: str) -> None:
    try:
        check_name("weights", name)
    except ValueError as e:
        raise InvalidInput(str(e), hint="Pass another name with --name.") from e


def _require_environment(client: Client) -> None:
    # check before the upload, which may take hours
    wanted = client.profile.environment
    if wanted not in {row["name"] for row in client.environments()}:
        raise NotFound(
            f"environment {wanted!r} does not exist",
            hint=f"Create it with: pilotlight environment create {wanted}",
        )


def _follow(session: Session, text: str, steps: Iterable[WeightsProgress]) -> WeightsInfo:
    info: WeightsInfo | None = None
    with _bar(session, text) as bar:
        for step in steps:
            info = step.info or info
            if step.total_bytes:
                bar(step.done_bytes, step.total_bytes)
    if info is None:
        raise PilotlightError(
            f"{text}: the node did not report a result",
            hint="Check with `pilotlight weights list`.",
        )
    return info


@contextlib.contextmanager
def _bar(session: Session, text: str) -> Iterator[Bar]:
    """Show a progress bar with bytes, rate and remaining time; silent with --json."""
    if session.is_json:
        yield lambda _done, _total: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=session.notes(), transient=True) as bars:
        task = bars.add_task(text, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextlib.contextmanager
def _spinner(session: Session, text: str) -> Iterator[Callable[[str], None]]:
    if session.is_json:
        yield lambda _: None
        return
    with session.notes().status(text) as status:
        yield status.update


def _pushed(info: WeightsInfo, pushed: PushResult) -> str:
    sent = (
        f"{format_bytes(pushed.uploaded_bytes)} uploaded"
        if pushed.uploaded_bytes
        else "already uploaded"
    )
    return (
        f"{info.name}: {format_bytes(info.size_bytes)} in {info.files} files, {sent}\nuse them with "
        f"pilotlight.Weights.named({info.name!r})"
    )


def _pulled(pulled: PullResult) -> str:
    came = (
        f"{format_bytes(pulled.fetched_bytes)} fetched"
        if pulled.fetched_bytes
        else "nothing to fetch"
    )
    return f"{pulled.directory}: {format_bytes(pulled.size_bytes)} in {pulled.files} files, verified ({came})"


def _verdict(name: str, checked: WeightsVerification) -> str:
    if not checked.is_here:
        return f"{name} is not on the node: nothing to verify"
    if not checked.corrupt:
        return f"{name}: every byte on the node matches its hashes"
    files = ", ".join(checked.corrupt)
    return f"{name}: files damaged on the node, to be fetched again when needed: {files}"


def _where(info: WeightsInfo) -> str:
    places = {
        "origin": "in the platform's store only",
        "nvme": "on its disk",
        "dram": "in its memory",
    }
    return places.get(info.tier or "", "location unknown: the node does not answer")


def _details(info: WeightsInfo, manifest: Manifest) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape

    expected = (
        ""
        if info.expected_s is None
        else f"; a start would wait {format_milliseconds(info.expected_s * 1000)} for it"
    )
    kept = ", pinned" if info.is_pinned else ""
    by = f"deployed with {info.app}" if info.app else "pushed"
    mapped = "" if info.instances is None else f", mapped by {info.instances} instances"
    lines = [
        (
            f"{info.name}  {format_bytes(info.size_bytes)} in {info.files} files, {by} "
            f"{format_time(info.updated_at)}"
        ),
        f"manifest {info.manifest}",
        escape(f"source {info.source or '-'}"),
        f"{_where(info)}{kept}{mapped}{expected}",
        f"in GPU memory: {format_hbm(info) or 'nowhere'}",
    ]
    return Group(*lines, "", format_table(file_rows(manifest), _FILE_COLUMNS, empty=""))

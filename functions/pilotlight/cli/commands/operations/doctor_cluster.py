"""`pilotlight doctor --cluster`: check whether a Kubernetes cluster meets the platform's
requirements, and print the commands that fix it."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pilotlight.errors import InvalidInput, Unavailable

if TYPE_CHECKING:
    from rich.text import Text

    from pilotlight.cli.core.session import Session
    from pilotlight.kubernetes.doctor.findings import Finding

ROLES = ("operator", "controller", "activator", "autoscaler")


def examine_cluster(session: Session, *, role: str) -> bool:
    """Check the cluster and print the findings; return whether nothing is broken.

    Args:
        role: whose permissions are checked; `operator` is the user of this command.

    Raises:
        InvalidInput: unknown role, or invalid platform.yaml.
        Unavailable: the Kubernetes client is not installed.
    """
    if role not in ROLES:
        raise InvalidInput(f"--role {role}: must be one of {', '.join(ROLES)}")
    if importlib.util.find_spec("kubernetes") is None:
        raise Unavailable(
            "the Kubernetes client is not installed", hint="Run pip install 'pilotlight[k8s]'."
        )
    from pilotlight.core.settings import SettingsInvalid, load_section
    from pilotlight.kubernetes.doctor.checks import examine_cluster
    from pilotlight.kubernetes.doctor.findings import BROKEN
    from pilotlight.kubernetes.settings import ClusterSettings

    platform = session.platform()
    try:
        settings = load_section(
            ClusterSettings, "cluster", platform.config if platform.config.exists() else None
        )
    except SettingsInvalid as e:
        raise InvalidInput(str(e), hint="Correct section cluster of platform.yaml.") from e
    found = asyncio.run(examine_cluster(settings, role=role))  # type: ignore[arg-type]  # one of ROLES, above
    if session.is_json:
        session.show([dataclasses.asdict(one) for one in found], lambda: "")
    else:
        # do not wrap lines: commands are copied from the output
        session.console().print(format_findings(found), soft_wrap=True)
    return not any(one.state == BROKEN for one in found)


def format_findings(found: Sequence[Finding]) -> Text:
    """Format one line for each finding, with fixes below it."""
    from rich.text import Text

    styles = {"ok": "green", "note": "yellow", "broken": "red"}
    width = max(len(one.what) for one in found)
    out = Text()
    for one in found:
        out.append(f"{one.state:<6}", styles[one.state]).append(
            f"  {one.what:<{width}}  {one.detail}\n"
        )
        helps = (
            []
            if one.state == "ok"
            else [
                *([one.way_out] if one.way_out else []),
                *(f"$ {command}" for command in one.commands),
            ]
        )
        for line in helps:
            out.append(f"{'':{width + 10}}{line}\n", "dim")
    counts = {state: sum(one.state == state for one in found) for state in styles}
    out.append(f"{counts['ok']} ok, {counts['note']} notes, {counts['broken']} broken")
    return out

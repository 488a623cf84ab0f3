"""Writes what is derived in deploy/kubernetes: the chart's schema and rights, and the plain
rendering of the chart for kustomize.

`scripts/render-kustomize` writes it, `--check` only says what is not up to date. No cluster and no
network are needed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from pilotlight.kubernetes import rbac
from scripts.chart_schema import schema

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy/kubernetes/chart"
KUSTOMIZE = ROOT / "deploy/kubernetes/kustomize"
NAMESPACE = "pilotlight"
MARK = "# Written by scripts/render-kustomize.\n"


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    """Helm, of this Python's environment if it is there."""
    own = Path(sys.executable).parent / "helm"
    program = str(own) if own.exists() else shutil.which("helm") or "helm"
    return subprocess.run([program, *words], capture_output=True, text=True, check=False)


def schema_text() -> str:
    """Of values.schema.json."""
    return json.dumps(schema(), indent=2) + "\n"


def rights_text() -> str:
    """Of files/rights.yaml: RBAC rules by process and scope."""
    scopes: tuple[rbac.Scope, ...] = ("all", "tenant", "warm", "platform", "knative")
    processes: tuple[rbac.Role, ...] = ("controller", "activator", "autoscaler")
    rules = {role: {scope: rbac.rules(role, scope) for scope in scopes} for role in processes}
    return MARK + yaml.safe_dump(rules, sort_keys=False, width=140)


def rendering_text() -> str:
    """Of kustomize/pilotlight.yaml: the chart with its default values."""
    done = helm(
        "template", "pilotlight", str(CHART), "--namespace", NAMESPACE, "--kube-version", "1.34.0"
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    text = done.stdout.replace(
        "app.kubernetes.io/managed-by: Helm", "app.kubernetes.io/managed-by: kustomize"
    )
    return MARK + text


def files() -> Mapping[Path, str]:
    """What is derived from the chart's sources and ours. The rendering reads what comes before
    it."""
    return {CHART / "values.schema.json": schema_text(), CHART / "files/rights.yaml": rights_text()}


def main(argv: list[str]) -> int:
    """Write, or with `--check` compare; returns the exit status."""
    stale = []
    for path, text in files().items():
        stale += _write(path, text, only_check="--check" in argv)
    stale += _write(KUSTOMIZE / "pilotlight.yaml", rendering_text(), only_check="--check" in argv)
    for path in stale:
        print(
            f"{path.relative_to(ROOT)} "
            f"{'is not up to date: scripts/render-kustomize' if '--check' in argv else 'written'}"
        )
    return 1 if stale and "--check" in argv else 0


def _write(path: Path, text: str, *, only_check: bool) -> list[Path]:
    if path.exists() and path.read_text() == text:
        return []
    if not only_check:
        path.write_text(text)
    return [path]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

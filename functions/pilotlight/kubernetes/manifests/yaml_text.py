"""Manifests as YAML documents, the same bytes every time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml


class _Plain(yaml.SafeDumper):
    """Writes every value out where it stands."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never `&id001`: a manifest is read by people."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Lists are indented below their key."""
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Several lines stand as lines."""
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Plain.add_representer(str, _text)


def to_yaml(manifests: Iterable[Mapping[str, Any]]) -> str:
    """Documents, each begun by `---`."""
    return "".join(
        f"---\n{yaml.dump(dict(one), Dumper=_Plain, sort_keys=False, width=160, allow_unicode=True)}"
        for one in manifests
    )

"""Serializes manifests as YAML documents, deterministically."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml


class _Plain(yaml.SafeDumper):
    """Writes every value in place, without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always True: no `&id001`, which people cannot read easily."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent lists below their key."""
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Write multi-line text as a block."""
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Plain.add_representer(str, _text)


def to_yaml(manifests: Iterable[Mapping[str, Any]]) -> str:
    """The documents, each preceded by `---`."""
    return "".join(
        f"---\n{yaml.dump(dict(one), Dumper=_Plain, sort_keys=False, width=160, allow_unicode=True)}"
        for one in manifests
    )

"""Operations of a server that only note that they were reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pilotlight.core.rpc import RpcOperation, SendPart


def noting(names: Iterable[str]) -> tuple[dict[str, RpcOperation], list[str]]:
    """Operations of these names, and those that were reached."""
    reached: list[str] = []

    def operation(name: str) -> RpcOperation:
        async def run(_args: Mapping[str, Any], _part: SendPart) -> Mapping[str, Any]:
            reached.append(name)
            return {}

        return run

    return {name: operation(name) for name in names}, reached


async def no_part(_: Mapping[str, Any]) -> None:
    """Takes no parts."""

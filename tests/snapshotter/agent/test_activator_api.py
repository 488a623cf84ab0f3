"""What the node agent takes from an activator that is not root."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pilotlight.core.rpc import RpcOperation
from snapshotter.agent.activator_api import OPEN, SEALED, operations
from snapshotter.agent.launch_signature import LaunchSigner
from snapshotter.errors import OrderRefused
from snapshotter.types import WeightsMount
from tests.fakes.noting import no_part, noting
from tests.snapshotter.agent.test_launch_signature import LAUNCH

RAW = bytes(range(32))
SEALED_LAUNCH = LaunchSigner.of_raw(RAW).signed(LAUNCH)
ORDER = {
    "instance_id": "i-0123456789abcdef",
    "lessee": "a-0",
    "secret_env": {"TOKEN": "t"},
    "launch": SEALED_LAUNCH.to_json(),
}


@pytest.fixture
def asked(tmp_path: Path) -> tuple[Mapping[str, RpcOperation], list[str]]:
    """Operations of an agent that notes what reaches it, as activators have them."""
    (tmp_path / "platform.key").write_bytes(base64.urlsafe_b64encode(RAW))
    everything = (
        *OPEN,
        *SEALED,
        "exec",
        "logs",
        "build_image",
        "delete_image",
        "delete_snapshots",
        "prove_snapshot",
        "capabilities",
    )
    found, reached = noting(everything)
    return operations(found, tmp_path / "platform.key", uid_base=20000), reached


async def test_what_the_controller_sealed_is_started(
    asked: tuple[Mapping[str, RpcOperation], list[str]],
) -> None:
    found, reached = asked
    for name in SEALED:
        await found[name](ORDER, no_part)
    assert reached == [*SEALED]
    assert set(found) == {*OPEN, *SEALED}, (
        "no commands beside instances, no logs, no images, no snapshots to delete"
    )


@pytest.mark.parametrize("operation", SEALED)
@pytest.mark.parametrize(
    "change",
    [
        {"uid": 0},
        {"uid": 20001},
        {"uid": None},
        {"trust_domain": "t-2"},
        {"bundle": "c" * 64},
        {"image": "d" * 64},
        {"engine": "../../root"},
        {"weights": (WeightsMount(name="m", manifest="e" * 64),)},
        {"entry": {"name": "other"}},
        {"env": {"LD_PRELOAD": "/tmp/x"}},
        {"memory_bytes": 1 << 40},
        {"labels": {**SEALED_LAUNCH.labels, "tenant": "t-2"}},
        {"labels": {"tenant": "t-1"}},
        {"labels": {**SEALED_LAUNCH.labels, "grant": "0" * 64}},
    ],
)
async def test_a_launch_document_of_its_own_making_is_refused(
    asked: tuple[Mapping[str, RpcOperation], list[str]], operation: str, change: dict[str, Any]
) -> None:
    found, reached = asked
    with pytest.raises(OrderRefused, match="signature is missing or invalid"):
        await found[operation](
            {**ORDER, "launch": replace(SEALED_LAUNCH, **change).to_json()}, no_part
        )
    assert not reached


@pytest.mark.parametrize(
    "change, said",
    [
        (
            {"instance_id": "../../../etc/cron.d/x"},
            "instance_id '../../../etc/cron.d/x' is invalid",
        ),
        ({"instance_id": "i-0123456789abcdef\n"}, "instance_id"),
        ({"instance_id": 7}, "instance_id '7' is invalid"),
        ({"lessee": "a-0\nforged line"}, "lessee"),
        ({"lessee": None}, "lessee"),
        ({"secret_env": ["A=B"]}, "secret_env must be an object with string values"),
        ({"secret_env": {"A": 1}}, "secret_env must be an object with string values"),
        ({"share": {"weight": "x"}}, "share: invalid share of weight x"),
        ({"share": {"weight": 0}}, "share: invalid share of weight 0"),
        ({"share": {"log_bytes": "x"}}, "share: invalid share of weight 1"),
        ({"share": {"reserved": {"t": -1}}}, "share: invalid share of weight 1"),
        ({"share": [1]}, "share: "),
        ({"launch": {}}, "does not match this version"),
        ({"launch": None}, "does not match this version"),
        ({"launch": {**SEALED_LAUNCH.to_json(), "new": 1}}, "does not match this version"),
    ],
)
async def test_names_and_shapes_are_checked(
    asked: tuple[Mapping[str, RpcOperation], list[str]], change: dict[str, Any], said: str
) -> None:
    found, reached = asked
    with pytest.raises(OrderRefused, match=said):
        await found["start"]({**ORDER, **change}, no_part)
    assert not reached

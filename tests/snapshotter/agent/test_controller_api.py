"""What the node agent takes from a controller that is not root."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pilotlight.core.rpc import RpcOperation
from pilotlight.core.settings import Paths
from snapshotter.agent import activator_api
from snapshotter.agent.controller_api import guest, operations
from snapshotter.agent.launch_signature import LaunchSigner
from snapshotter.errors import OrderRefused
from tests.fakes.noting import no_part, noting
from tests.snapshotter.agent.test_launch_signature import LAUNCH, RAW

INSTANCE = "i-0123456789abcdef"
VOLUME = "vol-0123456789abcdef"
EVERYTHING = (
    "start",
    "prepare",
    "stop",
    "sleep",
    "wake",
    "adopt",
    "instances",
    "templates",
    "drop_template",
    "checkpoint",
    "snapshots",
    "prove_snapshot",
    "quarantine_snapshot",
    "delete_snapshots",
    "capabilities",
    "gpus",
    "usage",
    "watch",
    "logs",
    "exec",
    "build_image",
    "delete_image",
    "scan_volume",
    "upload_volume",
    "commit_volume",
    "reload_volume",
    "drop_volume",
)
TAKEN: dict[str, dict[str, Any]] = {
    "instances": {"labels": {}},
    "stop": {"instance_id": INSTANCE, "grace_s": 1.0},
    "templates": {},
    "drop_template": {"revision": "f-1@v1"},
    "snapshots": {"labels": {}},
    "prove_snapshot": {"snapshot_id": "sn-0123456789abcdef"},
    "quarantine_snapshot": {"snapshot_id": "sn-0123456789abcdef", "reason": "it leaks"},
    "delete_snapshots": {"snapshot_id": None, "revision": "f-1@v1", "function": None},
    "capabilities": {},
    "gpus": {},
    "usage": {"instance_id": INSTANCE},
    "logs": {
        "labels": {},
        "instance_id": None,
        "since": None,
        "tail": None,
        "call_id": None,
        "follow": False,
    },
    "exec": {"instance_id": INSTANCE, "argv": ["id"]},
    "build_image": {"spec": {}, "uid": 20001},
    "delete_image": {"digest": "a" * 64, "uid": 20001},
    "scan_volume": {"volume": VOLUME, "tenant": "t-1", "uid": 20001, "max_entries": 10},
    "upload_volume": {"volume": VOLUME, "tenant": "t-1", "uid": 20001, "digests": []},
    "commit_volume": {"volume": VOLUME, "tenant": "t-1", "uid": 20001, "version": 1},
    "reload_volume": {"volume": VOLUME, "tenant": "t-1", "uid": 20001},
    "drop_volume": {"volume": VOLUME, "tenant": "t-1", "uid": 20001},
}


@pytest.fixture(name="agent")
def _agent() -> tuple[Mapping[str, RpcOperation], list[str]]:
    """Operations of an agent that notes what reaches it, as root has them."""
    return noting(EVERYTHING)


async def test_what_the_controller_asks_is_taken_and_nothing_else_is_there(
    agent: tuple[Mapping[str, RpcOperation], list[str]],
) -> None:
    of_root, reached = agent
    found = operations(of_root, uid_base=20000)
    for name, args in TAKEN.items():
        await found[name](args, no_part)
    assert reached == [*TAKEN]
    assert set(found) == set(TAKEN), "it starts nothing: activators do, what it has sealed"


@pytest.mark.parametrize(
    "operation, change",
    [
        *(
            (name, {"uid": uid})
            for name in ("build_image", "delete_image")
            for uid in (None, 0, 19902, 19999, -1, True, "20001", 20001.0)
        ),
        ("delete_image", {"digest": "../../node/code"}),
        ("delete_image", {"digest": None}),
        ("exec", {"instance_id": "../i"}),
        ("stop", {"instance_id": None}),
        ("usage", {"instance_id": INSTANCE + "\n"}),
        ("logs", {"instance_id": "../../../../var/log/x"}),
        ("prove_snapshot", {"snapshot_id": "../x"}),
        ("quarantine_snapshot", {"snapshot_id": "../x"}),
        ("delete_snapshots", {"snapshot_id": "sn-1/../x"}),
    ],
)
async def test_names_and_users_that_are_no_tenants_are_refused(
    agent: tuple[Mapping[str, RpcOperation], list[str]], operation: str, change: dict[str, Any]
) -> None:
    of_root, reached = agent
    with pytest.raises(OrderRefused):
        await operations(of_root, uid_base=20000)[operation](
            {**TAKEN[operation], **change}, no_part
        )
    assert not reached


@pytest.mark.parametrize("uid", [0, None, 1000, 19901, 19902])
async def test_a_seal_starts_nothing_as_root_or_as_another_user(
    agent: tuple[Mapping[str, RpcOperation], list[str]], tmp_path: Path, uid: int | None
) -> None:
    of_root, reached = agent
    (tmp_path / "platform.key").write_bytes(base64.urlsafe_b64encode(RAW))
    found = activator_api.operations(of_root, tmp_path / "platform.key", uid_base=20000)
    order = {"instance_id": INSTANCE, "lessee": "a-0", "secret_env": {}}
    for name in activator_api.SEALED:
        with pytest.raises(
            OrderRefused,
            match=r"is not a tenant's uid: they start at snapshotter\.uid_base = 20000",
        ):
            await found[name](
                {
                    **order,
                    "launch": LaunchSigner.of_raw(RAW).signed(replace(LAUNCH, uid=uid)).to_json(),
                },
                no_part,
            )
    assert not reached
    await found["start"](
        {**order, "launch": LaunchSigner.of_raw(RAW).signed(LAUNCH).to_json()}, no_part
    )


def test_a_controller_without_a_uid_of_its_own_is_no_guest(
    tmp_path: Path, agent: tuple[Mapping[str, RpcOperation], list[str]]
) -> None:
    assert guest(agent[0], Paths(home=tmp_path, run=tmp_path), uid_base=20000) is None
    found = guest(
        agent[0], Paths(home=tmp_path, run=tmp_path, controller_uid=19902), uid_base=20000
    )
    assert found is not None
    assert found.uid == 19902

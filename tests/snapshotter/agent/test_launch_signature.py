"""Seals of launch documents."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from dataclasses import replace

import pytest

from pilotlight.core.crypto import PlatformKey
from snapshotter.agent.launch_signature import KEY_LABEL, LABEL, LaunchSigner, verify_launch
from snapshotter.types import LaunchSpec, RevisionKey, WeightsMount

RAW = bytes(range(32))
GRANTS = LaunchSigner.of_raw(RAW)
LAUNCH = LaunchSpec(
    revision=RevisionKey("f-1@v1"),
    trust_domain="t-1",
    uid=20000,
    bundle="b" * 64,
    image=None,
    entry={"name": "né", "options": [1, 2.5, None]},
    weights=(WeightsMount(name="m", manifest="a" * 64),),
    memory_bytes=1 << 30,
    cpu=0.5,
    startup_timeout_s=60.0,
    labels={"tenant": "t-1"},
)


def test_a_sealed_document_survives_its_way_through_a_file_and_a_launcher() -> None:
    sent = LaunchSpec.from_json(
        json.loads(json.dumps(GRANTS.signed(LAUNCH).to_json(), indent=1, ensure_ascii=False))
    )
    assert GRANTS.verify(sent)
    assert verify_launch(sent) == LAUNCH
    assert GRANTS.signed(sent) == GRANTS.signed(LAUNCH)


@pytest.mark.parametrize(
    "change",
    [
        {"uid": 20001},
        {"bundle": "c" * 64},
        {"weights": ()},
        {"memory_bytes": 1 << 40},
        {"entry": {}},
        {"snapshot": False},
        {"env": {"A": "B"}},
        {"labels": {"tenant": "t-2"}},
    ],
)
def test_whatever_is_changed_breaks_the_seal(change: dict[str, object]) -> None:
    sealed = GRANTS.signed(LAUNCH)
    change = (
        {**change, "labels": {**sealed.labels, **change["labels"]}}  # type: ignore[dict-item]
        if "labels" in change
        else change
    )
    assert not GRANTS.verify(replace(sealed, **change))  # type: ignore[arg-type]


def test_no_seal_holds_nothing() -> None:
    assert not GRANTS.verify(LAUNCH)
    assert not GRANTS.verify(replace(LAUNCH, labels={LABEL: ""}))


def test_the_controllers_key_derives_the_same() -> None:
    assert LaunchSigner(PlatformKey(base64.urlsafe_b64encode(RAW)).derived(KEY_LABEL)).verify(
        GRANTS.signed(LAUNCH)
    )


def test_a_signature_of_a_version_that_knew_one_kind_of_gpu_is_still_valid() -> None:
    bare = {**LAUNCH.to_json(), "gpu": "H100", "gpu_count": 2}
    omitted = {"image", "env", "engine", "offline", "egress", "forkable", "snapshot"}
    omitted.add("gpu_memory_bytes")
    text = {n: v for n, v in bare.items() if n not in {*omitted, "secret_variables"}}
    text["image"] = None
    signature = hmac.new(
        hmac.new(RAW, KEY_LABEL, hashlib.sha256).digest(),
        json.dumps(text, sort_keys=True, separators=(",", ":")).encode(),
        hashlib.sha256,
    ).hexdigest()
    document = {**bare, "labels": {**LAUNCH.labels, LABEL: signature}}

    launch = LaunchSpec.from_json(document)
    assert launch.gpu == ("H100",)
    assert GRANTS.verify(launch)
    assert not GRANTS.verify(replace(launch, gpu=("H100", "A100")))
    without = LaunchSpec.from_json({**GRANTS.signed(LAUNCH).to_json(), "gpu": None})
    assert without.gpu == ()
    assert GRANTS.verify(without)

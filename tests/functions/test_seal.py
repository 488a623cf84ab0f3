"""Each purpose has a key of its own, and activators have only what they need."""

from __future__ import annotations

import base64
import itertools
import stat
from pathlib import Path

import pytest
from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pilotlight.core.crypto import (
    SEALED_PREFIX,
    ActivatorKey,
    DecryptionFailed,
    PlatformKey,
    Sealer,
    load_activator_key,
    load_platform_key,
)
from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid

RAW = bytes(range(32))
KEY = PlatformKey(base64.urlsafe_b64encode(RAW))


def sealers(key: PlatformKey) -> dict[str, Sealer]:
    return {
        "secrets": key.activator.secrets,
        "replies": key.activator.replies,
        "visitors": key.activator.visitors,
        "sessions": key.sessions,
        "webhooks": key.webhooks,
        "answers": key.answers,
    }


def test_what_is_sealed_for_one_purpose_opens_for_no_other() -> None:
    for (sealing, one), (opening, other) in itertools.product(sealers(KEY).items(), repeat=2):
        sealed = one.seal("text")
        if sealing == opening:
            assert other.open(sealed) == "text"
        else:
            with pytest.raises(DecryptionFailed, match=f"key for {opening}"):
                other.open(sealed)


def test_the_platforms_key_itself_opens_nothing_that_is_sealed() -> None:
    for sealer in sealers(KEY).values():
        sealed = sealer.seal("text")
        assert sealed.startswith(SEALED_PREFIX)
        with pytest.raises(InvalidToken):
            Fernet(base64.urlsafe_b64encode(RAW)).decrypt(sealed.removeprefix(SEALED_PREFIX))


def test_keys_are_derived_with_hkdf_sha256_by_purpose() -> None:
    def derived(key: bytes, purpose: str) -> bytes:
        return HKDF(
            algorithm=SHA256(), length=32, salt=None, info=f"pilotlight/v1/{purpose}".encode()
        ).derive(key)

    sealed = KEY.activator.secrets.seal("text").removeprefix(SEALED_PREFIX)
    own = base64.urlsafe_b64encode(derived(derived(RAW, "activator"), "secrets"))
    assert Fernet(own).decrypt(sealed.encode()) == b"text"


def test_what_activators_have_opens_nothing_of_the_controllers(tmp_path: Path) -> None:
    KEY.activator.write(tmp_path / "activator.key")
    theirs = ActivatorKey.load(tmp_path / "activator.key")
    assert theirs.token == KEY.token
    assert theirs.secrets.open(KEY.activator.secrets.seal("text")) == "text"
    as_master = PlatformKey((tmp_path / "activator.key").read_bytes().strip())
    for name in ("sessions", "webhooks", "answers"):
        with pytest.raises(DecryptionFailed):
            sealers(as_master)[name].open(sealers(KEY)[name].seal("text"))
    assert as_master.node_token != KEY.node_token


def test_the_activators_key_file_is_private_and_replaced_where_it_is_another(
    tmp_path: Path,
) -> None:
    file = tmp_path / "activator.key"
    ActivatorKey(bytes(32)).write(file)
    KEY.activator.write(file)
    assert ActivatorKey.load(file).token == KEY.token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["activator.key"]


def test_a_key_of_the_activators_own_stands_in_for_the_derived_one(tmp_path: Path) -> None:
    ActivatorKey(bytes(32)).write(tmp_path / "given.key")
    settings = PlatformSettings(activator_key_file=str(tmp_path / "given.key"))
    paths = Paths(home=tmp_path, run=tmp_path)
    assert (
        load_platform_key(settings, paths).token
        == load_activator_key(settings, paths).token
        == ActivatorKey(bytes(32)).token
    )


@pytest.mark.parametrize("content", [None, b"", b"c2hvcnQ=", b"not base64!"])
def test_a_missing_or_broken_key_file_is_refused_by_name(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "activator.key").write_bytes(content)
    with pytest.raises(
        SettingsInvalid, match=r"activator\.key: (activator key not readable|not an activator key)"
    ):
        load_activator_key(PlatformSettings(), Paths(home=tmp_path, run=tmp_path))

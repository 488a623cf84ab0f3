"""The proof that CRIU works here: made by doing, kept, and off with a reason."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.criu import logs, messages
from snapshotter.criu.errors import CriuReason, CriuUnavailable
from snapshotter.criu.self_test import RETRY_S, SelfTest, self_test
from tests.fakes import fake_criu

NOW = 1_800_000_000.0


def fake(tmp_path: Path, *, script: str = "good", version: str = "4.2.1") -> dict[str, str]:
    """An environment whose only `criu` is a fake one."""
    found = messages.find_descriptor_set(os.environ, None) or tmp_path / "none"
    fake_criu.install(tmp_path / "bin", script=script, description=found, version=version)
    return {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}


async def test_without_criu_it_says_how_to_get_it(tmp_path: Path) -> None:
    found = await self_test(cache=tmp_path, environ={"PATH": str(tmp_path)})
    assert not found.on
    assert "scripts/install-criu" in found.why
    with pytest.raises(CriuUnavailable, match="install-criu"):
        found.criu()


@pytest.mark.root
async def test_old_criu_is_off_before_it_is_tried(tmp_path: Path) -> None:
    found = await self_test(cache=tmp_path / "cache", environ=fake(tmp_path, version="3.17.1"))
    assert not found.on
    assert found.version == "3.17.1"
    assert "too old" in found.why


@pytest.mark.root
async def test_without_description_it_says_so(tmp_path: Path) -> None:
    environ = {**fake(tmp_path), messages.DESCRIPTOR_VARIABLE: str(tmp_path / "absent")}
    found = await self_test(cache=tmp_path / "cache", environ=environ)
    assert "no description" in found.why


@pytest.mark.root
@pytest.mark.parametrize(
    "script, words",
    [
        ("refuse", "tcp-established"),
        ("die", "killed by signal 9"),
        ("garbage", "answer is invalid"),
    ],
)
async def test_failing_criu_is_off_with_its_reason(
    tmp_path: Path, criu_proof: SelfTest, script: str, words: str
) -> None:
    found = await self_test(cache=tmp_path / "cache", environ=fake(tmp_path, script=script))
    assert not found.on
    assert words in found.why
    assert "FORK and COLD work without it" in found.why


@pytest.mark.root
async def test_fake_success_is_not_believed(tmp_path: Path, criu_proof: SelfTest) -> None:
    """This one claims to have dumped and restored: the process that it names is not there."""
    found = await self_test(cache=tmp_path / "cache", environ=fake(tmp_path))
    assert not found.on


@pytest.mark.root
async def test_proof_is_made_once_per_boot(tmp_path: Path, criu_proof: SelfTest) -> None:
    first = await self_test(cache=tmp_path, environ=os.environ, now=NOW)
    assert first.on
    assert first.version == criu_proof.version
    assert first.kdat is not None
    assert first.kdat.stat().st_size > 0
    again = await self_test(cache=tmp_path, environ=os.environ, now=NOW + 86_400)
    assert again == first, "the answer of the first proof, its time included"
    first.kdat.unlink()
    assert (await self_test(cache=tmp_path, environ=os.environ, now=NOW + 1)).at == NOW + 1, (
        "what goes with the answer is gone"
    )


@pytest.mark.root
async def test_refusal_is_asked_again_after_a_while(tmp_path: Path) -> None:
    environ = fake(tmp_path, version="3.17.1")
    first = await self_test(cache=tmp_path / "cache", environ=environ, now=NOW)
    assert (
        await self_test(cache=tmp_path / "cache", environ=environ, now=NOW + RETRY_S - 1) == first
    )
    later = await self_test(cache=tmp_path / "cache", environ=environ, now=NOW + RETRY_S)
    assert later == replace(first, at=NOW + RETRY_S, seconds=later.seconds)


@pytest.mark.root
async def test_broken_cache_is_no_answer(tmp_path: Path, criu_proof: SelfTest) -> None:
    await self_test(cache=tmp_path, environ=os.environ, now=NOW)
    kept = next(tmp_path.glob("*.json"))
    kept.write_text(kept.read_text()[:40])
    assert (await self_test(cache=tmp_path, environ=os.environ, now=NOW + 1)).at == NOW + 1


@pytest.mark.root
async def test_kept_answer_names_the_binary_where_it_is_now(
    tmp_path: Path, criu_proof: SelfTest
) -> None:
    """The same bytes at another place: the place of the first proof may not exist any more."""
    await self_test(cache=tmp_path / "cache", environ=os.environ, now=NOW)
    assert criu_proof.binary is not None
    assert criu_proof.descriptor_set is not None
    moved = Path(shutil.copy2(criu_proof.binary, tmp_path / "criu"))
    environ = {"PATH": str(tmp_path), messages.DESCRIPTOR_VARIABLE: str(criu_proof.descriptor_set)}
    again = await self_test(cache=tmp_path / "cache", environ=environ, now=NOW + 1)
    assert again.at == NOW, "the kept answer"
    assert again.binary == moved


@pytest.mark.parametrize("option", [16, 34])
def test_kernel_whose_tcp_sockets_it_does_not_know_is_named(option: int) -> None:
    log = (
        f"(00.030751) Error (criu/sockets.c:628): sockets: Can't get 1:{option} opt: Operation "
        f"not supported\n"
    )
    log += "(00.030775) Error (criu/cr-dump.c:1681): Dump files (pid: 1001) failed with -1\n"
    cause = logs.cause_of(log.encode())
    assert cause.reason is CriuReason.KERNEL
    assert "scripts/install-criu" in cause.message

"""Names of Debian packages: only those that apt-get cannot read as anything else."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import Any

import pytest

from pilotlight.core.image_steps import apt_packages, check_debian_package_name
from snapshotter.images.builder import APT_INSTALL


@pytest.mark.parametrize(
    "name",
    ["ffmpeg", "libgl1", "libglib2.0-0", "g++", "libstdc++6", "python3.11", "0ad", "libsigc++"],
)
def test_plain_names_of_packages_are_accepted(name: str) -> None:
    assert check_debian_package_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *(
            "criu-",
            "ffmpeg+",
            "ffmpeg=7:5.1",
            "ffmpeg/stable",
            "ffmpeg:arm64",
            "desktop^",
            "python3.*",
            "lib[xyz]",
            "^curl$",
            "?all",
            "~nssh",
        ),
        *(
            "-y",
            "--reinstall",
            "-o=Dpkg::Pre-Invoke::=id",
            "FFmpeg",
            "a",
            "a b",
            "a\n",
            "a;id",
            "./evil.deb",
            "/tmp/evil.deb",
            "é1",
            "",
            "libc.",
        ),
        *("x" * 129, 7, None),
    ],
)
def test_what_apt_could_read_as_something_else_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match="is not the name of a Debian package"):
        check_debian_package_name(name)


def test_packages_of_all_apt_steps_are_found() -> None:
    steps: list[dict[str, Any]] = [
        {"op": "apt", "packages": ["b1", "a1"]},
        {"op": "pip", "packages": ["criu-"]},
        {"op": "apt", "packages": ["b1"]},
        {"op": "apt"},
    ]
    assert apt_packages(steps) == ["b1", "a1"]
    with pytest.raises(ValueError, match="expected a list"):
        apt_packages([{"op": "apt", "packages": "criu-"}])


@pytest.mark.skipif(
    shutil.which("apt-get") is None or os.geteuid() != 0, reason="needs Debian and root"
)
@pytest.mark.parametrize("argument", ["apt-", "coreutil.", "coreutil?"])
async def test_apt_get_removes_nothing_and_expands_nothing(argument: str) -> None:
    command = [*APT_INSTALL[:-2], "--simulate", *APT_INSTALL[-2:], argument]
    child = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await child.communicate()
    assert child.returncode != 0, out.decode()
    assert b"Remv" not in out.splitlines()[-1]

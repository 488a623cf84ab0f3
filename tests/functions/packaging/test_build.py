"""From an App to specs, blobs and images, and on to a platform."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.client.client import Client
from pilotlight.errors import InvalidInput, NotFound, PilotlightError, TooLarge
from pilotlight.packaging.app_loader import load_app
from pilotlight.packaging.build import build
from pilotlight.packaging.deploy import ProgressEvent, deploy
from pilotlight.packaging.weights_push import SourceBody
from pilotlight.spec.function import FunctionKind, FunctionSpec
from pilotlight.spec.record_json import from_json, to_json
from snapshotter.images.spec import image_digest, parse_image
from tests.fakes.fake_platform import FakePlatform
from weight_cache.manifest import parse as parse_manifest

ROOT = Path(__file__).parents[3]

SHOP = """
import pilotlight
from helpers import rate

image = pilotlight.Image.python("3.11").pip_install("numpy").env({"A": "1"})
app = pilotlight.App("shop", image=image, env={"B": "2"}, secrets=[pilotlight.Secret.from_dict({"TOKEN": "t"})])
model = pilotlight.Weights("./model")

@app.function(weights=model, env={"C": "3"})
def price(n: int) -> int:
    return n * rate
"""


@pytest.fixture(name="shop")
def _shop(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights.bin").write_bytes(b"w" * 1000)
    (tmp_path / "helpers.py").write_text("rate = 3")
    (tmp_path / "shop.py").write_text(SHOP)
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path / "shop.py"
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def names_in(blob: object) -> list[str]:
    assert isinstance(blob, bytes)
    with tarfile.open(fileobj=io.BytesIO(blob)) as tar:
        return tar.getnames()


def test_a_spec_names_everything_by_digest(shop: Path) -> None:
    built = build(load_app(str(shop)))

    (spec,) = built.functions
    assert (spec.kind, spec.module, spec.qualname, spec.pickled) == (
        FunctionKind.FUNCTION,
        "shop",
        "price",
        None,
    )
    assert spec.env == {"A": "1", "B": "2", "C": "3"}
    assert names_in(built.blobs[spec.bundle]) == ["helpers.py", "shop.py"]
    assert built.secrets == {spec.secrets[0]: {"TOKEN": "t"}}
    assert from_json(FunctionSpec, to_json(spec)) == spec


def test_building_twice_gives_the_same_specs(shop: Path) -> None:
    app = load_app(str(shop))

    assert build(app).functions == build(app).functions


def test_weights_become_a_manifest_and_one_blob_per_file(shop: Path) -> None:
    built = build(load_app(str(shop)))

    (weights,) = built.functions[0].weights
    raw = built.blobs[weights.manifest]
    assert isinstance(raw, bytes)
    (file,) = parse_manifest(raw).files
    assert (weights.name, file.path) == ("model", "weights.bin")
    body = built.blobs[file.digest]
    assert isinstance(body, SourceBody)
    assert (str(body), body.size_bytes, b"".join(body)) == ("weights.bin", 1000, b"w" * 1000)
    assert hashlib.sha256(raw).hexdigest() == weights.manifest


def test_the_builder_reads_the_image_under_the_same_digest(shop: Path) -> None:
    ((digest, spec),) = build(load_app(str(shop))).images.items()

    assert image_digest(to_json(spec)) == digest
    assert [step.op for step in parse_image(to_json(spec)).steps] == ["pip", "env"]


def test_a_module_of_a_package_is_bundled_from_the_packages_top(tmp_path: Path, shop: Path) -> None:
    package = tmp_path / "project" / "acme" / "apps"
    package.mkdir(parents=True)
    for directory in (package.parent, package):
        (directory / "__init__.py").touch()
    (package / "web.py").write_text(
        'import pilotlight\napp = pilotlight.App("web")\n\n@app.function()\ndef f(): ...\n'
    )

    built = build(load_app(str(package / "web.py")))

    (spec,) = built.functions
    assert spec.module == "acme.apps.web"
    assert names_in(built.blobs[spec.bundle]) == [
        "acme/__init__.py",
        "acme/apps/__init__.py",
        "acme/apps/web.py",
    ]


def test_a_scripts_functions_travel_by_value(tmp_path: Path, platform: FakePlatform) -> None:
    (tmp_path / "script.py").write_text(
        "import pilotlight\n"
        "app = pilotlight.App('script')\n"
        "factor = 7\n"
        "@app.function()\n"
        "def times(n):\n"
        "    return n * factor\n"
        "@app.function()\n"
        "def twice(n):\n"
        "    return times.local(n) * 2 if False else n * 2\n"
        "def main():\n"
        "    def inner(n): return n + factor\n"
        "    app.function()(inner)\n"
        "    with app.run():\n"
        "        print(times.remote(6), twice.remote(4))\n"
        "main()\n"
    )
    environment = {
        "PYTHONPATH": f"{ROOT / 'functions'}:{ROOT}",
        "PILOTLIGHT_URL": platform.url,
        "PILOTLIGHT_API_KEY": platform.profile().api_key,
    }

    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout == "42 8\n"
    assert [line.split()[0] for line in done.stderr.splitlines()] == [
        "packaging",
        "upload:",
        "deploying",
    ]
    assert any(
        b".pilotlight" in b"".join(n.encode() for n in names_in(blob))
        for blob in platform.blobs.values()
    )
    assert platform.apps == {}


def test_deploying_sends_what_is_missing_once_and_makes_it_live(
    shop: Path, platform: FakePlatform, client: Client
) -> None:
    events: list[ProgressEvent] = []
    app = load_app(str(shop))
    home = shop.parent / "home"
    home.mkdir()
    (home / "platform.lock").touch()

    first = deploy(
        app, client=client, message="hello", labels={"by": "test"}, progress=events.append
    )
    puts = [line for line in platform.asked if line.startswith("PUT /v1/blobs")]
    second = deploy(app, client=client)

    assert (first.version, second.version) == (1, 2)
    assert (first.functions[0].created, second.functions[0].created) == (True, False)
    assert len(puts) == 3
    assert puts == [line for line in platform.asked if line.startswith("PUT /v1/blobs")]
    notice, *others = [e for e in events if e.stage != "package"]
    assert notice.text == f"{home} is the home of a platform and is not uploaded"
    assert [e.stage for e in others] == ["upload"] * 4 + ["image"] * 2 + ["deploy"]
    assert client.history("shop")[-1]["message"] == "hello"


def test_a_failed_image_leaves_what_is_live_alone(
    shop: Path, platform: FakePlatform, client: Client
) -> None:
    shop.write_text(SHOP.replace('"numpy"', '"no-such-package"'))

    with pytest.raises(PilotlightError, match="no-such-package"):
        deploy(load_app(str(shop)), client=client)
    assert platform.apps == {}


def test_too_much_source_is_refused_before_anything_is_sent(
    shop: Path, platform: FakePlatform, client: Client
) -> None:
    with pytest.raises(TooLarge, match=r"shop\.py"):
        deploy(load_app(str(shop)), client=client, limit_bytes=100)
    assert platform.asked == []


@pytest.mark.parametrize(
    "source, message",
    [
        ("import pilotlight\napp = pilotlight.App('empty')", "has no functions"),
        ("x = 1", "0 apps"),
        ("import pilotlight\na = pilotlight.App('a')\nb = pilotlight.App('b')", "2 apps"),
        (
            (
                "import pilotlight\napp = "
                "pilotlight.App('w')\n@app.function(weights=pilotlight.Weights('./none'))\ndef f(): ..."
            ),
            "no directory at",
        ),
    ],
)
def test_an_app_that_cannot_be_built_says_why(shop: Path, source: str, message: str) -> None:
    shop.write_text(source)

    with pytest.raises((InvalidInput, NotFound), match=message):
        build(load_app(str(shop)))


def test_a_file_that_would_hide_the_standard_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "types.py").touch()

    with pytest.raises(InvalidInput, match="rename the file"):
        load_app(str(tmp_path / "types.py"))
    with pytest.raises(NotFound, match="no such file"):
        load_app(str(tmp_path / "missing.py"))

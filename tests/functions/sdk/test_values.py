"""Image, Weights and Secret: what they describe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pilotlight import Image, Secret, Weights
from pilotlight.errors import InvalidInput, NotFound
from pilotlight.sdk.secret import parse_dotenv


def no_pack(path: Path, name: str) -> str:
    raise AssertionError(f"nothing is copied, but {path} was packed")


def test_an_image_is_its_steps_in_order() -> None:
    image = (
        Image.python("3.11")
        .pip_install("numpy", ["scipy"])
        .apt_install("ffmpeg")
        .run("echo hi")
        .env({"A": "1"})
    )

    spec = image.spec(no_pack)

    assert spec.python == "3.11"
    assert list(spec.steps) == [
        {"op": "pip", "packages": ["numpy", "scipy"], "options": []},
        {"op": "apt", "packages": ["ffmpeg"]},
        {"op": "run", "commands": ["echo hi"]},
        {"op": "env", "values": {"A": "1"}},
    ]
    assert image.variables == {"A": "1"}


def test_modals_spellings_give_the_same_image() -> None:
    ours = (
        Image.python("3.12")
        .pip_install("numpy", index_url="https://example.org/simple", pre=True)
        .run("true")
    )
    theirs = Image.debian_slim(python_version="3.12").uv_pip_install(
        "numpy", index_url="https://example.org/simple", pre=True
    )

    assert theirs.run_commands("true").spec(no_pack) == ours.spec(no_pack)
    assert ours.spec(no_pack).steps[0]["options"] == [
        "--index-url",
        "https://example.org/simple",
        "--pre",
    ]


def test_a_copied_file_lands_in_its_targets_directory_and_a_directory_at_its_target(
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "a.txt").write_text("a")
    packed: list[tuple[str, str]] = []

    def pack(path: Path, name: str) -> str:
        packed.append((path.name, name))
        return "0" * 64

    spec = (
        Image.python("3.11")
        .copy(tmp_path / "a.txt", "conf/b.txt")
        .copy(tmp_path / "a.txt", "/data/")
        .add_local_dir(tmp_path / "data", "data")
        .spec(pack)
    )

    assert [step["target"] for step in spec.steps] == ["conf", "/data", "data"]
    assert packed == [("a.txt", "b.txt"), ("a.txt", "a.txt"), ("data", "data")]


def test_a_file_cannot_be_copied_into_the_root_directory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    image = Image.python("3.11").copy(tmp_path / "a.txt", "/data")
    with pytest.raises(InvalidInput, match=r"'/data' is in the root directory: .* '/data/data'"):
        image.spec(lambda *_: "0" * 64)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Image.python("2.7"), "python version '2.7'"),
        (lambda: Image.python("3.11").pip_install("--pre"), "extra_options="),
        (lambda: Image.python("3.11").apt_install("a b"), "not the name of a Debian package"),
        (lambda: Image.python("3.11").apt_install("criu-"), "not the name of a Debian package"),
        (
            lambda: Image.python("3.11").apt_install("ffmpeg=7:5.1"),
            "not the name of a Debian package",
        ),
        (lambda: Image.python("3.11").copy("x", "/etc/x"), "the system"),
        (lambda: Image.python("3.11").copy("x", "../x"), "must not have"),
        (
            lambda: Image.python("3.11").env({"A": 1}),  # type: ignore[dict-item]
            "A = 1: must be a string",
        ),
        (lambda: Image.from_registry("a b"), "is not the name of a container image"),
        (lambda: Image.from_registry("debian", secret=1), "secret is not supported"),
        (lambda: Image.from_registry("debian", add_python="3.9"), "at least 3.11"),
    ],
)
def test_a_wrong_step_says_what_would_be_right(make: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()  # type: ignore[operator]


def test_an_image_begins_with_a_container_image_and_its_python_or_one_of_the_node() -> None:
    own = Image.from_registry("python:3.12-slim").pip_install("x").spec(lambda *_: "")
    assert (own.python, own.steps[0]) == ("", {"op": "from", "image": "python:3.12-slim"})
    assert Image.from_registry("debian:12", add_python="3.11").spec(lambda *_: "").python == "3.11"


def test_imports_that_only_the_image_has_are_passed_over_here_and_fail_in_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = Image.python("3.11")
    with image.imports():
        raise ImportError("not here")

    monkeypatch.setenv("PILOTLIGHT_WORKER", "1")
    with pytest.raises(ImportError), image.imports():
        raise ImportError("should be here")


def test_weights_are_found_beside_the_file_and_mounted_in_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(__file__).parent
    weights = Weights("../sdk", name="model")
    assert weights.path == here

    monkeypatch.setenv("PILOTLIGHT_WORKER", "1")
    monkeypatch.setenv("PILOTLIGHT_WEIGHTS", json.dumps({"model": str(tmp_path)}))
    assert weights.path == tmp_path
    with pytest.raises(NotFound, match="mounted weights: model"):
        _ = Weights("./other").path


def test_weights_are_named_after_their_directory() -> None:
    assert Weights("./all-MiniLM-L6-v2").name == "all-MiniLM-L6-v2"
    assert Weights("/data/7b model.v2/").name == "w-7b-model-v2"


def test_missing_weights_say_where_they_were_looked_for(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=str(tmp_path / "nothing")):
        _ = Weights(tmp_path / "nothing").path
    with pytest.raises(InvalidInput, match="must be a directory"):
        Weights("gs://bucket/model")
    with pytest.raises(NotFound, match="the package is not installed"):
        Weights.from_package("no_such_package_at_all")


def test_weights_of_a_package_are_its_directory() -> None:
    assert (Weights.from_package("pydantic", "deprecated").path / "json.py").exists()


def test_a_worker_without_the_package_can_import_a_module_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PILOTLIGHT_WORKER", "1")

    weights = Weights.from_package("no_such_package_at_all", "model")

    with pytest.raises(NotFound, match="declare them"):
        _ = weights.path


def test_a_dotenv_file_is_read_as_shells_write_it(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text(
        "# comment\nexport A=1\nB = 'two words' \nC=\"x\\ny\"\nD=plain # not this\nE=\n"
    )

    assert Secret.from_dotenv(tmp_path).values == {
        "A": "1",
        "B": "two words",
        "C": "x\ny",
        "D": "plain",
        "E": "",
    }
    with pytest.raises(InvalidInput, match="where:1: expected KEY=value"):
        parse_dotenv("nonsense", "where")
    with pytest.raises(NotFound, match=r"no \.env file"):
        Secret.from_dotenv(tmp_path / "missing")


def test_a_secrets_stored_name_depends_on_its_variables_and_not_on_their_values() -> None:
    first, second = Secret.from_dict({"TOKEN": "a"}), Secret.from_dict({"TOKEN": "b", "NONE": None})

    assert first.stored_name("shop") == second.stored_name("shop")
    assert first.stored_name("shop") != Secret.from_dict({"OTHER": "a"}).stored_name("shop")
    assert Secret.from_name("stripe").stored_name("shop") == "stripe"
    assert "a" not in repr(first).removeprefix("<Secret with ")

"""What a model directory means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.weight_cache.tensors.models_on_disk import EVERY_KIND, save, save_in_two
from weight_cache.errors import TensorsInvalid
from weight_cache.tensors.files import INDEX, find_files, read_files, tensor_locations


def test_a_file_means_itself_and_a_directory_its_whole_model(tmp_path: Path) -> None:
    file = save(tmp_path)
    save(tmp_path, name="other.safetensors")
    assert find_files(file) == [file]
    assert find_files(tmp_path) == [file]


def test_an_index_names_the_files_of_a_directory(tmp_path: Path) -> None:
    save_in_two(tmp_path)
    save(tmp_path, name="left-over.safetensors")
    assert [file.name for file in find_files(tmp_path)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert set(tensor_locations(read_files(tmp_path))) == set(EVERY_KIND)


def test_without_either_it_means_all_of_them(tmp_path: Path) -> None:
    names = [
        save(tmp_path, {kind: EVERY_KIND[kind]}, name=f"{kind}.safetensors").name
        for kind in ("bool", "scalar")
    ]
    assert [file.name for file in find_files(tmp_path)] == names


def test_a_directory_without_any_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(TensorsInvalid, match="save the model with safetensors"):
        find_files(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save(tmp_path, name="a.safetensors")
    save(tmp_path, name="b.safetensors")
    with pytest.raises(TensorsInvalid, match=r"is in a\.safetensors and in b\.safetensors"):
        tensor_locations(read_files(tmp_path))


@pytest.mark.parametrize(
    "index, why",
    [
        ("not json", "is not JSON"),
        ("[]", "expected weight_map"),
        ('{"weight_map": {}}', "expected weight_map"),
        ('{"weight_map": {"a": 1}}', "expected weight_map"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "not a file beside it"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not a file beside it"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "not a file beside it"),
        ('{"weight_map": {"a": ".."}}', "not a file beside it"),
        (json.dumps({"weight_map": {"a": "x" * 5000}}), "not a file beside it"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, index: str, why: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises((TensorsInvalid, OSError), match=f"{why}|File name too long"):
        find_files(tmp_path)

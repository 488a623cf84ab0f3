"""Tensors that are their file."""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path

import pytest
import torch

from tests.weight_cache.tensors.models_on_disk import EVERY_KIND, large, same, save, save_in_two
from weight_cache.errors import TensorsInvalid
from weight_cache.tensors.files import read_files
from weight_cache.tensors.mapped import MappedTensors
from weight_cache.tensors.prefetch import FilePrefetcher, is_in_memory, stop_prefetching


def mapped(path: Path) -> MappedTensors:
    return MappedTensors(read_files(path))


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read tensors ahead"]


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    """Whether its memory is the file's."""
    address = tensor.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return line.rstrip().endswith(str(path))
    return False


@pytest.mark.parametrize("files", [1, 2])
def test_every_kind_of_tensor_is_what_was_saved(tmp_path: Path, files: int) -> None:
    path = save(tmp_path) if files == 1 else save_in_two(tmp_path)
    tensors = mapped(path)
    assert set(tensors) == set(EVERY_KIND)
    assert len(tensors) == len(EVERY_KIND)
    assert all(same(tensors[name], expected) for name, expected in EVERY_KIND.items())


def test_their_memory_is_the_file_and_one_mapping_serves_all(tmp_path: Path) -> None:
    file = save(tmp_path)
    tensors = dict(mapped(file))
    assert all(is_mapped(tensor, file) for name, tensor in tensors.items() if name != "empty")
    assert (
        len(
            {
                tensor.untyped_storage().data_ptr()
                for name, tensor in tensors.items()
                if name != "empty"
            }
        )
        == 1
    )
    assert tensors["float32"] is not None


def test_writing_to_one_changes_neither_the_file_nor_another_mapping(tmp_path: Path) -> None:
    file = save(tmp_path)
    before = file.read_bytes()
    tensor = mapped(file)["float32"]
    tensor += 1
    assert file.read_bytes() == before
    assert same(mapped(file)["float32"], EVERY_KIND["float32"])


def test_tensors_keep_the_mapping_when_the_rest_is_gone(tmp_path: Path) -> None:
    tensor = mapped(save(tmp_path))["int64"]
    (tmp_path / "model.safetensors").unlink()
    assert tensor.tolist() == list(range(7))


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    file = save(tmp_path)
    before = os.listdir("/proc/self/fd")
    tensors = dict(mapped(file))
    assert os.listdir("/proc/self/fd") == before
    assert tensors


def test_only_the_names_that_were_asked_for(tmp_path: Path) -> None:
    tensors = MappedTensors(read_files(save(tmp_path)), names={"bool", "scalar"})
    assert set(tensors) == {"bool", "scalar"}
    assert "int64" not in tensors
    with pytest.raises(KeyError):
        tensors["int64"]


def test_one_that_is_not_aligned_is_copied(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} '
    file = tmp_path / "odd.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + struct.pack("<2f", 1.5, -2.5))
    assert (8 + len(header)) % 4
    tensor = mapped(file)["a"]
    assert tensor.tolist() == [1.5, -2.5]
    assert not is_mapped(tensor, file)


def test_one_that_lies_beyond_its_file_is_never_made(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"U8","shape":[9999],"data_offsets":[0,9999]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    file = tmp_path / "lies.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    tensors = mapped(file)
    with pytest.raises(TensorsInvalid, match=r"lies\.safetensors: tensor 'a' ends at byte"):
        tensors["a"]
    with pytest.raises(TensorsInvalid, match=r"lies\.safetensors.*overlaps"):
        dict(tensors)


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path)
    tensors = mapped(file)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(TensorsInvalid, match="cannot be mapped"):
        tensors["bool"]


def test_a_type_that_torch_does_not_have_is_named(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    (tmp_path / "six.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(3)
    )
    with pytest.raises(TensorsInvalid, match="F6_E2M3, which torch"):
        mapped(tmp_path / "six.safetensors")["a"]


def test_four_bits_lie_two_in_a_byte(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]}}'
    (tmp_path / "four.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(4)
    )
    assert mapped(tmp_path / "four.safetensors")["a"].shape == (2, 2)


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    with torch.device("meta"):
        tensors = dict(mapped(save(tmp_path)))
    assert all(same(tensors[name], expected) for name, expected in EVERY_KIND.items())


def test_the_rest_of_a_file_that_is_not_in_memory_is_read_ahead(tmp_path: Path) -> None:
    file, state = large(tmp_path)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_in_memory(descriptor, file.stat().st_size):
            pytest.skip("this file system is memory")
        tensor = mapped(file)["t4"]
        for thread in reading_threads():
            thread.join()
        assert is_in_memory(descriptor, file.stat().st_size)
        assert same(tensor, state["t4"])
    finally:
        os.close(descriptor)


def test_reading_ahead_stops_when_told_and_leaves_no_thread(tmp_path: Path) -> None:
    file, _ = large(tmp_path)
    tensors = mapped(file)
    storage = tensors["t1"].untyped_storage()
    reading = FilePrefetcher(storage.data_ptr(), [(0, storage.nbytes())] * 1000, keep=storage)
    reading.start()
    stop_prefetching()
    assert repr(reading) == "<FilePrefetcher ended>"
    assert reading_threads() == []


def test_reading_ahead_holds_the_mapping_no_longer_than_it_reads(tmp_path: Path) -> None:
    file, _ = large(tmp_path)
    storage = mapped(file)["t1"].untyped_storage()
    reading = FilePrefetcher(storage.data_ptr(), [(0, storage.nbytes())], keep=storage)
    del storage
    reading.start()
    reading.wait()
    assert str(file) not in Path("/proc/self/maps").read_text()


def test_a_range_that_is_not_there_ends_it_quietly() -> None:
    reading = FilePrefetcher(0, [(0, 1 << 30)], keep=None)
    reading.start()
    reading.wait()
    assert not reading.is_running

"""Which paths of an instance's socket are storage."""

from __future__ import annotations

import pytest

from activator.control_plane.function_storage import parse_storage_path


@pytest.mark.parametrize(
    "path, last, is_volume",
    [
        ("/v1/volumes/data:commit", ("data", "commit"), True),
        ("/v1/dicts/seen", ("dicts", "seen"), False),
        ("/v1/queues/jobs", ("queues", "jobs"), False),
    ],
)
def test_storage_is_found_by_its_path(path: str, last: tuple[str, str], is_volume: bool) -> None:
    found = parse_storage_path(path)
    assert found is not None
    assert (found.last, found.is_volume) == (last, is_volume)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/dicts",
        "/v1/dicts/",
        "/v1/dicts/a/b",
        "/v1/dicts/a%2Fb",
        "/v1/queues/a:get",
        "/v1/volumes/data",
        "/internal/collections/t/main/dicts/a",
        "/v1/secrets/a",
    ],
)
def test_other_paths_are_not(path: str) -> None:
    assert parse_storage_path(path) is None

"""An identity changes with everything that a process image depends on, and names what changed."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from snapshotter.snapshots.identity import (
    Identity,
    NodeIdentity,
    cpu_digest,
    identity_of,
    node_identity,
    source_digest,
)
from snapshotter.types import GpuDevice, GpuGrant, LaunchSpec, RevisionKey, WeightsMount
from tests.fakes.fake_nvml import H100, L4, gpus, inventory_of
from tests.snapshotter.snapshots import shapes


@dataclass(frozen=True)
class OnDisk:
    """An interpreter and packages in a directory."""

    prefix: Path
    files: Path | None = None
    links: tuple[str, ...] = ()
    rootfs: Path | None = None
    rootfs_digest: str = ""

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python3.11"

    @property
    def site(self) -> tuple[Path, ...]:
        return (self.prefix / "site",)

    @property
    def env(self) -> dict[str, str]:
        return {}


@pytest.fixture
def layout(tmp_path: Path) -> OnDisk:
    for name, content in {
        "bin/python3.11": "python",
        "lib/libpython3.11.so.1.0": "lib",
        "site/numpy-1.dist-info/RECORD": "one",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(content)
    return OnDisk(tmp_path)


NODE = NodeIdentity(
    runtime="r", kernel="6.1", machine="x86_64", cpu="c", criu="4.2 abc", driver="", gpus=""
)


def launch(**changes: Any) -> LaunchSpec:
    values: dict[str, Any] = {
        "revision": RevisionKey("fn@r1"),
        "trust_domain": "t",
        "uid": 20000,
        "bundle": "b" * 64,
        "image": None,
        "entry": {"object": "app:f"},
        "env": {"A": "1"},
        "weights": (WeightsMount(name="m", manifest="1" * 64),),
        "memory_bytes": 10**9,
        "cpu": 1.0,
        "startup_timeout_s": 60.0,
    }
    return LaunchSpec(**{**values, **changes})


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("revision", {"revision": RevisionKey("fn@r2")}),
    ("bundle", {"bundle": "c" * 64}),
    ("image", {"image": "img-1"}),
    ("entry", {"entry": {"object": "app:g"}}),
    ("env", {"env": {"A": "2"}}),
    ("uid", {"uid": 20001}),
    ("weights", {"weights": ()}),
    ("limits", {"memory_bytes": 2 * 10**9}),
    ("limits", {"cpu": 2.0}),
    ("gpu", {"gpu": "H100"}),
]


@pytest.mark.parametrize("field, change", CHANGES)
def test_each_part_of_a_launch_counts_and_is_named(
    layout: OnDisk, field: str, change: dict[str, Any]
) -> None:
    one, other = identity_of(launch(), NODE, layout), identity_of(launch(**change), NODE, layout)
    assert one.first_difference(other) == field
    assert one.digest() != other.digest()


@pytest.mark.parametrize("field", ["runtime", "kernel", "machine", "cpu", "criu", "driver"])
def test_each_part_of_the_machine_counts_and_is_named(layout: OnDisk, field: str) -> None:
    other = replace(NODE, **{field: "another"})
    assert (
        identity_of(launch(), NODE, layout).first_difference(identity_of(launch(), other, layout))
        == field
    )


def test_another_gpu_counts_only_for_who_asks_for_one(layout: OnDisk) -> None:
    other = replace(NODE, gpus="H200")
    assert identity_of(launch(), NODE, layout) == identity_of(launch(), other, layout)
    assert identity_of(launch(gpu=("any",)), NODE, layout) != identity_of(
        launch(gpu=("any",)), other, layout
    )


def test_the_model_and_number_of_the_granted_gpus_count_and_not_which_ones(
    layout: OnDisk,
) -> None:
    one, twin, other = inventory_of(*gpus(H100, H100, L4)).devices
    wanted = launch(gpu=("H100", "L4"))

    def of(*devices: GpuDevice) -> Identity:
        return identity_of(wanted, NODE, layout, GpuGrant(kind="H100", devices=devices))

    assert of(one) == of(twin)
    assert of(one).first_difference(of(other)) == "gpu"
    assert of(one) != of(one, twin)
    assert of(one) != identity_of(wanted, NODE, layout)


def test_what_is_no_part_of_the_process_does_not_count(layout: OnDisk) -> None:
    other = launch(labels={"app": "x"}, secret_variables=("KEY",), startup_timeout_s=5.0)
    assert identity_of(launch(), NODE, layout) == identity_of(other, NODE, layout)


def test_the_kind_of_the_root_file_system_and_its_packages_count(layout: OnDisk) -> None:
    roots = [
        layout,
        *(
            replace(layout, rootfs=layout.prefix, rootfs_digest=digest)
            for digest in ("1" * 64, "2" * 64)
        ),
    ]
    host, one, other = (identity_of(launch(), NODE, root) for root in roots)
    assert host.rootfs == "host"
    assert host.first_difference(one) == one.first_difference(other) == "rootfs"


def test_an_upgraded_interpreter_is_named(layout: OnDisk) -> None:
    before = identity_of(launch(), NODE, layout)
    (layout.prefix / "lib/libpython3.11.so.1.0").write_text("another lib")
    assert before.first_difference(identity_of(launch(), NODE, layout)) == "python"


def test_an_upgraded_package_of_the_platforms_own_environment_is_named(layout: OnDisk) -> None:
    before, built = (
        identity_of(launch(), NODE, layout),
        identity_of(launch(image="i"), NODE, layout),
    )
    os.rename(layout.prefix / "site/numpy-1.dist-info", layout.prefix / "site/numpy-2.dist-info")
    assert before.first_difference(identity_of(launch(), NODE, layout)) == "image"
    assert built == identity_of(launch(image="i"), NODE, layout)


def test_the_same_everywhere_it_is_the_same(layout: OnDisk) -> None:
    one = identity_of(launch(), NODE, layout)
    assert one.first_difference(one) is None
    assert Identity.from_json(one.to_json()) == one


@pytest.mark.parametrize(
    "body",
    [{}, {**shapes.identity().to_json(), "more": "x"}, {**shapes.identity().to_json(), "uid": 5}],
)
def test_a_malformed_identity_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="text fields"):
        Identity.from_json(body)


def test_the_first_difference_is_in_the_order_of_the_fields() -> None:
    one, other = shapes.identity(), shapes.identity(gpu="x", env="y", kernel="z")
    assert one.first_difference(other) == "env"


def test_processor_flags_count_in_any_order() -> None:
    assert cpu_digest("model : 1\nflags\t: sse avx\n") == cpu_digest(
        "model : 2\nflags\t: avx sse\n"
    )
    assert cpu_digest("flags\t: sse avx\n") != cpu_digest("flags\t: sse avx avx512\n")
    assert cpu_digest("Features\t: asimd\n") != cpu_digest("Features\t: sve\n")


def test_our_own_sources_count(tmp_path: Path) -> None:
    (tmp_path / "boot.py").write_text("one")
    (tmp_path / "notes.txt").write_text("not source")
    before = source_digest({"worker": tmp_path})
    (tmp_path / "notes.txt").write_text("still not")
    assert source_digest({"worker": tmp_path}) == before
    (tmp_path / "boot.py").write_text("two")
    assert source_digest({"worker": tmp_path}) != before


def test_this_machine_has_an_identity(tmp_path: Path) -> None:
    rows = [{"driver": "535", "name": "H100"}, {"driver": "535", "name": "H100"}]
    node = node_identity(
        runtime={"t": tmp_path}, criu_version="4.2.1", criu_sha256="ab" * 32, gpus=rows
    )
    assert (node.kernel, node.driver, node.gpus) == (os.uname().release, "535", "H100,H100")
    assert node.criu == "4.2.1 abababababababab"

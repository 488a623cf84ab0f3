"""The tests' kubelet pulls images from a real registry, with the logins that a pod has."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from pilotlight.core.oci.image_reference import parse_repository
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.packaging.oci.registry import Registry
from pilotlight.packaging.oci.registry_login import find_login
from tests.fakes.image_registry import PASSWORD, USER, ImageRegistry, make_layout
from tests.fakes.knative import image_pull
from tests.fakes.knative.images import Images
from tests.fakes.kubernetes.server import ApiServer


def pushed(registry: ImageRegistry, folder: Path, *texts: str) -> str:
    repository = parse_repository(f"{registry.host}/functions/acme")
    digest = make_layout(folder, *texts)
    with Registry(repository, find_login(repository, registry.environ())) as pushing:
        pushing.push(folder, tag="latest")
    return f"{repository}@{digest}"


def login_of(host: str, password: str) -> dict[str, str]:
    pair = base64.b64encode(f"{USER}:{password}".encode()).decode()
    raw = json.dumps({"auths": {host: {"auth": pair}}}).encode()
    return {".dockerconfigjson": base64.b64encode(raw).decode()}


async def test_an_image_is_pulled_with_the_logins_of_the_pods_secrets(
    image_registry: ImageRegistry, tmp_path: Path
) -> None:
    reference = pushed(image_registry, tmp_path / "image", "first", "second")
    names = [{"name": "missing"}, {"name": "wrong"}, {"name": "right"}]
    pod = {"metadata": {"namespace": "default"}, "spec": {"imagePullSecrets": names}}
    async with ApiServer() as server:
        settings = ClusterSettings(kubeconfig=str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        async with await Cluster.connect(settings) as cluster:
            images = Images(directory=tmp_path / "images")
            said = await images.pull(cluster, pod, reference)
            assert said is not None
            assert said.endswith("401 Unauthorized")
            for name, password in (("wrong", "wrong"), ("right", PASSWORD)):
                assert reference not in images.pulled
                body = {
                    "apiVersion": "v1",
                    "kind": "Secret",
                    "metadata": {"name": name, "namespace": "default"},
                    "type": "kubernetes.io/dockerconfigjson",
                    "data": login_of(image_registry.host, password),
                }
                server.put(body)
                said = await images.pull(cluster, pod, reference)
            assert said is None
            root = images.root(reference)
            assert root is not None
            assert (root / "file").read_text() == "second"
            elsewhere = {"metadata": {"namespace": "other"}, "spec": {}}
            assert await images.pull(cluster, pod, reference) is None
            assert "401 Unauthorized" in str(await images.pull(cluster, elsewhere, reference))
            absent = f"{reference.partition('@')[0]}@sha256:{'0' * 64}"
            assert "not found" in str(await images.pull(cluster, pod, absent))


async def test_other_registries_images_are_this_machines_files(tmp_path: Path) -> None:
    pod = {"metadata": {"namespace": "default"}, "spec": {}}
    async with ApiServer() as server:
        settings = ClusterSettings(kubeconfig=str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        async with await Cluster.connect(settings) as cluster:
            images = Images(directory=tmp_path)
            other = f"registry.example/runtime@sha256:{'0' * 64}"
            assert await images.pull(cluster, pod, other) is None
            assert images.root(other) is None


@pytest.mark.parametrize("marker", [".wh.file", ".wh..wh..opq"])
def test_a_layer_removes_what_it_marks(tmp_path: Path, marker: str) -> None:
    make_layout(tmp_path / "one", "text", name="below/file")
    make_layout(tmp_path / "two", "", name=f"below/{marker}")
    for layout in ("one", "two"):
        for blob in (tmp_path / layout / "blobs/sha256").iterdir():
            if (data := blob.read_bytes()).startswith(b"\x1f\x8b"):
                image_pull.apply_layer(data, tmp_path / "root")
    assert list((tmp_path / "root" / "below").iterdir()) == []

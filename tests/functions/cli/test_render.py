"""`pilotlight render`: the manifests of an app, without a platform and without sending anything."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from pilotlight.cli.main import build
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.settings import ClusterSettings
from tests.fakes.kubernetes.thread import running_api_server

EXAMPLES = Path(__file__).parents[3] / "examples"
IMAGE = "registry.example/runtime@sha256:" + "0" * 64
IMAGED = """
import pilotlight

app = pilotlight.App("imaged")

@app.function(image=pilotlight.Image.python("3.11").pip_install("numpy"))
def f() -> int:
    return 1
"""
NAMED = """
import pilotlight

app = pilotlight.App("search")

@app.function(weights=pilotlight.Weights.named("minilm"), secrets=[pilotlight.Secret.from_name("api")])
def embed(text: str) -> str:
    return text
"""


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No platform, no profile, no key."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "PILOTLIGHT_URL",
        "PILOTLIGHT_API_KEY",
        "PILOTLIGHT_HOME",
        "PILOTLIGHT_PLATFORM",
        "KUBECONFIG",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PILOTLIGHT_CONFIG", str(tmp_path / "none.toml"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("NO_COLOR", "1")


def render(
    *words: str, config: str = f"cluster: {{runtime_image: {IMAGE}, images: {{vllm: {IMAGE}}}}}"
) -> Result:
    """Run the command beside a platform.yaml."""
    Path("platform.yaml").write_text(config)
    return CliRunner().invoke(build(), ["render", *words], prog_name="pilotlight")


def in_cluster(kubeconfig: Path) -> str:
    """A platform.yaml of a cluster."""
    return (
        f"cluster: {{runtime_image: {IMAGE}, images: {{vllm: {IMAGE}}}, kubeconfig: {kubeconfig}}}"
    )


def documents(out: Result) -> list[dict[str, Any]]:
    """What it printed."""
    assert out.exit_code == 0, out.stderr
    return list(yaml.safe_load_all(out.stdout))


@pytest.mark.parametrize(
    "example, service",
    [("hello", "hello-hello"), ("embed", "search-embedder--1fe703eb4"), ("llm", "llm-assistant")],
)
def test_the_examples_are_manifests_that_a_prepared_cluster_takes(
    tmp_path: Path, example: str, service: str
) -> None:
    with running_api_server() as threaded:
        config = in_cluster(threaded.server.write_kubeconfig(tmp_path / "kubeconfig"))
        words = (str(EXAMPLES / f"{example}.py"), "--tenant", "acme", "--cluster")
        made = documents(render(*words, config=config))
        assert threaded.server.list("serving.knative.dev/v1", "Service") == []
    assert [one["kind"] for one in made[:5]] == [
        "Namespace",
        "RoleBinding",
        "RoleBinding",
        "ServiceAccount",
        "NetworkPolicy",
    ]
    assert (made[-1]["metadata"]["name"], made[-1]["metadata"]["namespace"]) == (service, "fn-acme")


def test_it_prints_the_same_every_time() -> None:
    first = render(str(EXAMPLES / "hello.py")).stdout
    assert first == render(str(EXAMPLES / "hello.py")).stdout


def test_tenant_environment_and_namespace_are_the_callers() -> None:
    staging = documents(render(str(EXAMPLES / "hello.py"), "--tenant", "acme", "-e", "staging"))
    assert staging[0]["metadata"]["name"] == "fn-acme--staging"
    given = documents(render(str(EXAMPLES / "hello.py"), "--namespace", "elsewhere"))
    assert {one["metadata"].get("namespace", "elsewhere") for one in given} == {"elsewhere"}


def test_one_file_for_the_namespace_and_one_for_each_function(tmp_path: Path) -> None:
    out = render(str(EXAMPLES / "hello.py"), "--output", str(tmp_path / "made"))
    assert out.exit_code == 0
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [
        "hello-hello.yaml",
        "namespace.yaml",
    ]
    assert out.stdout == ""


def test_as_json() -> None:
    body = json.loads(render(str(EXAMPLES / "hello.py"), "--json", "--check").stdout)
    assert [one["kind"] for one in body["manifests"]][-1] == "Service"
    assert body["problems"] == []
    assert any("allow-zero-initial-scale" in need["fix"] for need in body["needs"])


def test_what_the_cluster_must_have_switched_on_is_an_error_with_strict() -> None:
    lax = render(str(EXAMPLES / "hello.py"), "--check")
    assert lax.exit_code == 0
    assert "kubectl patch configmap/config-features" in lax.stderr
    strict = render(str(EXAMPLES / "hello.py"), "--strict")
    assert strict.exit_code == 1
    assert "podspec-volumes-hostpath" in strict.stderr


def test_what_the_cluster_refuses_is_an_error_with_the_command_that_helps(tmp_path: Path) -> None:
    with running_api_server(ready=False) as threaded:
        config = in_cluster(threaded.server.write_kubeconfig(tmp_path / "kubeconfig"))
        out = render(str(EXAMPLES / "hello.py"), "--cluster", config=config)
    assert out.exit_code == 1
    assert "podspec-volumes-hostpath" in out.stderr
    assert "kubectl patch configmap/config-autoscaler" in out.stderr
    away = render(str(EXAMPLES / "hello.py"), "--cluster", config=in_cluster(tmp_path / "none"))
    assert away.exit_code == 1
    assert "the cluster cannot validate the manifests" in away.stderr


def test_a_deployed_function_is_validated_in_its_namespace_whatever_its_next_number_is(
    tmp_path: Path,
) -> None:
    with running_api_server() as threaded:
        kubeconfig = threaded.server.write_kubeconfig(tmp_path / "kubeconfig")
        config = in_cluster(kubeconfig)
        words = (str(EXAMPLES / "hello.py"), "--tenant", "acme", "--cluster")
        deployed = documents(render(*words, config=config))[-1]
        deployed["spec"]["template"]["spec"]["containerConcurrency"] = 7

        async def deploy() -> None:
            async with await Cluster.connect(ClusterSettings(kubeconfig=str(kubeconfig))) as there:
                await there.apply(deployed)

        threaded.call(lambda: threaded.server.add_namespace("fn-acme"))
        asyncio.run(deploy())
        assert render(*words, config=config).exit_code == 0


@pytest.mark.slow  # asks again where no platform answers
def test_weights_that_lie_on_a_platform_are_stood_in_for_and_said_so(tmp_path: Path) -> None:
    (tmp_path / "named_app.py").write_text(NAMED)
    out = render(str(tmp_path / "named_app.py"))
    made = documents(out)
    assert "weights 'minilm' cannot be read" in out.stderr
    (secret,) = (one for one in made if one["kind"] == "Secret")
    assert secret["metadata"]["name"] == "secret-api"
    assert "data" not in secret


def test_without_an_image_it_says_what_to_set() -> None:
    out = render(str(EXAMPLES / "hello.py"), config="")
    assert out.exit_code == 1
    assert "cluster.runtime_image" in out.stderr
    assert documents(render(str(EXAMPLES / "hello.py"), "--image", IMAGE, config=""))
    assert (
        "by digest"
        in render(str(EXAMPLES / "hello.py"), "--image", "registry.example/x:1", config="").stderr
    )


def test_images_that_a_deploy_would_push_have_placeholders(tmp_path: Path) -> None:
    (file := tmp_path / "imaged_app.py").write_text(IMAGED)

    def image(*words: str, config: str) -> str:
        (service,) = (
            one
            for one in documents(render(str(file), "--tenant", "acme", *words, config=config))
            if one["kind"] == "Service"
        )
        return str(service["spec"]["template"]["spec"]["containers"][0]["image"])

    registry = "cluster: {registry: registry.example/functions}"
    assert image(config=registry) == f"registry.example/functions/acme@sha256:{'0' * 64}"
    assert image("--image", IMAGE, config=registry) == IMAGE
    assert "digests of images" in render(str(file), config=registry).stderr
    assert "Set cluster.registry" in render(str(file), config="").stderr


def test_a_tenants_name_must_be_one() -> None:
    out = render(str(EXAMPLES / "hello.py"), "--tenant", "no name")
    assert out.exit_code == 1
    assert "tenant name 'no name' is not valid" in out.stderr

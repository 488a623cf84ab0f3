"""An engine in a pod: the image's own packages, the splice on the pod's address, and the status
beside the engine's own paths."""

from __future__ import annotations

from pathlib import Path

from pilotlight.spec.engines import EngineSpec
from pilotlight.spec.function import (
    Clocks,
    FunctionKind,
    FunctionSpec,
    MethodSpec,
    Resources,
    WeightsSpec,
)
from snapshotter.types import WeightsMount
from tests.fakes.launched_pod import ROOT, pod
from tests.fakes.pod_agent import FakePodAgent

MANIFEST = "0" * 64


def test_an_engine_serves_on_the_pods_address_and_says_how_it_came_up(tmp_path: Path) -> None:
    spec = FunctionSpec(
        name="assistant",
        kind=FunctionKind.ENGINE,
        module="",
        qualname="",
        bundle="b" * 64,
        methods=(MethodSpec(),),
        weights=(WeightsSpec(name="m", manifest=MANIFEST),),
        engine=EngineSpec(model="m", max_model_len=512, max_num_seqs=4, kv_bytes=16 * 1024**2),
        resources=Resources(cpu=1.0, memory_bytes=512 * 1024**2),
        clocks=Clocks(startup_s=60.0),
    )
    with (
        pod({}, spec, weights=[WeightsMount(name="m", manifest=MANIFEST)]) as made,
        FakePodAgent(made.node) as agent,
    ):
        made.variables["PYTHONPATH"] = (
            f"{ROOT / 'tests/fakes/engine/site'}:{made.variables['PYTHONPATH']}"
        )
        made.begin()
        with agent.accept() as line:
            line.say(
                "cold",
                code=str(made.code),
                weights={"m": str(tmp_path)},
                phases_ms={"weights": 1.0},
            )
            assert line.hear()["op"] == "ready", made.wait_exit() and made.said
            with made.client() as client:
                health = client.get("/health")
                answer = client.post(
                    "/v1/completions",
                    json={"model": "assistant", "prompt": "hello", "max_tokens": 3},
                )
            with made.client() as fresh:
                status = fresh.get("/pilotlight/health")
            made.terminate()
            assert made.wait_exit() == 0

    assert health.status_code == 200
    assert answer.json()["choices"]
    assert status.headers["connection"] == "close"
    told = status.json()
    assert (told["instance"], told["start_kind"], told["running"]) == ("pod-1", "COLD", 0)
    assert list(told["phases_ms"]) == [
        "agent",
        "weights",
        "boot",
        "enter",
        "warmup",
        "serve",
        "wake",
    ]

"""A function does not choose its GPUs: CUDA_VISIBLE_DEVICES is the platform's."""

from __future__ import annotations

from typing import Any

import pytest

from pilotlight.controller.deployments.dependency_checks import parse_specs
from pilotlight.errors import InvalidInput
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused, spec

GPU: dict[str, Any] = {"resources": {"gpu": ["H100"], "gpu_count": 1}}


@pytest.mark.parametrize("value", ["0", "", "-1", "GPU-0c2f1b3e"])
def test_a_gpu_function_that_sets_it_is_refused(value: str) -> None:
    body = spec(env={"CUDA_VISIBLE_DEVICES": value}, **GPU)
    with pytest.raises(InvalidInput, match="remove it from env and the image") as refusal:
        parse_specs("search", [body])
    assert refusal.value.detail["parameter"] == "env"
    assert "function 'hello': env: CUDA_VISIBLE_DEVICES" in str(refusal.value)


def test_a_function_without_a_gpu_may_say_that_it_has_none() -> None:
    for value in ("", "-1"):
        [parsed] = parse_specs("search", [spec(env={"CUDA_VISIBLE_DEVICES": value})])
        assert parsed.env == {"CUDA_VISIBLE_DEVICES": value}
    with pytest.raises(InvalidInput, match="request GPUs with gpu="):
        parse_specs("search", [spec(env={"CUDA_VISIBLE_DEVICES": "0"})])


async def test_a_secret_does_not_set_it(controller: Controller) -> None:
    body = {"values": {"HF_TOKEN": "x", "CUDA_VISIBLE_DEVICES": "0"}}
    answer = await controller.http.put("/v1/secrets/HF", json=body)
    assert "CUDA_VISIBLE_DEVICES: the platform sets it" in refused(answer, 400)

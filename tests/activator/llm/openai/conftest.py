"""Language models behind an activator: the fake engine, over real HTTP, asked by OpenAI's own
client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from activator.settings import ActivatorSettings
from pilotlight.spec.engines import EngineSpec, Task, TokenLimits
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec, WeightsSpec
from pilotlight.spec.instances.scaling import Scaling
from tests.activator.conftest import KEY, PATIENCE_S, Edge
from tests.fakes.engine.engine import EngineFake
from tests.fakes.engine.served import ServedEngine
from tests.fakes.routes import route_of, spec_of

WEIGHTS = tuple(
    WeightsSpec(name=name, manifest=name[0] * 64) for name in ("model", "pirate", "poet")
)


def llm(
    name: str = "assistant",
    *,
    lora: tuple[str, ...] = (),
    task: Task = Task.GENERATE,
    engine: dict[str, Any] | None = None,
    limits: TokenLimits | None = None,
    **more: Any,
) -> FunctionSpec:
    """A function that is a language model, with the adapters of these names."""
    scaling = more.pop("scaling", Scaling(max_inputs=4))
    spec = EngineSpec(
        model="model",
        task=task,
        lora={one: one for one in lora},
        **{"max_model_len": 512, "max_num_seqs": 4, **(engine or {})},
    )
    return spec_of(
        name,
        kind=FunctionKind.ENGINE,
        methods=(MethodSpec(),),
        weights=WEIGHTS,
        engine=spec,
        limits=limits,
        scaling=scaling,
        **more,
    )


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(
        max_body_bytes=20_000,
        body_timeout_s=PATIENCE_S,
        header_timeout_s=PATIENCE_S,
        unauthenticated_per_s=5.0,
        heartbeat_s=PATIENCE_S,
    )


class Shop:
    """One activator with models, and its callers.

    Attributes:
        client: OpenAI's own, with a key of the tenant.
    """

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.client = self.openai()
        self._clients = [self.client]

    def openai(self, *, key: str = KEY, path: str = "/v1", **more: Any) -> openai.AsyncOpenAI:
        """OpenAI's client at this activator, which asks once."""
        client = openai.AsyncOpenAI(
            api_key=key,
            base_url=f"{self.edge.url}{path}",
            max_retries=0,
            timeout=PATIENCE_S,
            **more,
        )
        if hasattr(self, "_clients"):
            self._clients.append(client)
        return client

    @property
    def served(self) -> ServedEngine:
        """The instance that came up last."""
        return list(self.edge.fleet.engines.values())[-1]

    @property
    def engine(self) -> EngineFake:
        """What it is."""
        return self.served.engine

    async def post(
        self,
        body: Any,
        *,
        path: str = "/v1/chat/completions",
        key: str | None = KEY,
        **headers: str,
    ) -> httpx.Response:
        """A request by hand."""
        given = {"authorization": f"Bearer {key}"} if key else {}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {**given, "content-type": "application/json", **headers}
        return await self.edge.client.post(self.edge.url + path, content=data, headers=sent)

    async def get(self, path: str, *, key: str | None = KEY) -> httpx.Response:
        """The same to read."""
        return await self.edge.client.get(
            self.edge.url + path, headers={"authorization": f"Bearer {key}"} if key else {}
        )

    async def aclose(self) -> None:
        """Close its clients."""
        for client in self._clients:
            await client.close()


def chat(text: str = "hello there", **more: Any) -> dict[str, Any]:
    """A chat's body."""
    return {"model": "shop/assistant", "messages": [{"role": "user", "content": text}], **more}


def events_of(text: str) -> list[str]:
    """The events of a stream, as they are."""
    return [event for event in text.split("\n\n") if event]


@pytest.fixture(name="shop")
async def _shop(edge: Edge) -> AsyncIterator[Shop]:
    shop = Shop(edge)
    edge.add(route_of(llm(lora=("pirate",))))
    yield shop
    await shop.aclose()

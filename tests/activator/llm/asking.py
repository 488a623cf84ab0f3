"""Language models, and callers of them, for tests of what is asked for and granted."""

from __future__ import annotations

from typing import Any

from activator.access.grants import AccessCache, AccessGrant
from activator.quotas.process_store import ProcessQuotas
from activator.quotas.store_protocol import QuotaStore
from activator.routing.api_keys import Principal
from activator.routing.route_table import RouteTable
from activator.settings import ActivatorSettings
from pilotlight.protocol import FeedChange, KeyRecord
from pilotlight.spec.engines import EngineSpec, Task, TokenLimits
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec, WeightsSpec
from pilotlight.spec.identifiers import FunctionAddress, TenantId
from pilotlight.spec.instances.scaling import Scaling
from tests.fakes.routes import TENANT, change, empty_table, route_of, spec_of


def model(
    name: str = "hello",
    *,
    max_model_len: int = 1000,
    task: Task = Task.GENERATE,
    scaling: Scaling | None = None,
    **limits: Any,
) -> FunctionSpec:
    """A function of kind ENGINE."""
    scaling = scaling or Scaling(max_inputs=8)
    return spec_of(
        name,
        kind=FunctionKind.ENGINE,
        methods=(MethodSpec(),),
        scaling=scaling,
        weights=(WeightsSpec(name="model", manifest="m" * 64),),
        engine=EngineSpec(
            model="model", max_model_len=max_model_len, max_num_seqs=scaling.max_inputs, task=task
        ),
        limits=TokenLimits(**limits),
    )


class Door:
    """An entrance to one model, and the quotas there."""

    def __init__(
        self,
        spec: FunctionSpec,
        *,
        store: QuotaStore | None = None,
        plan: dict[str, Any] | None = None,
        **quotas: Any,
    ) -> None:
        """`plan`: of the tenant; `quotas`: of the caller's key."""
        self.table: RouteTable = empty_table()
        self.store = store or ProcessQuotas()
        self.entrance = AccessCache(
            table=self.table, store=self.store, settings=ActivatorSettings()
        )
        self.table.apply(change(1, route_of(spec)))
        value = {
            "id": TENANT,
            "name": "acme",
            "uid": None,
            "plan": {"name": "p", **plan} if plan else {},
            "suspended": False,
        }
        self.table.apply(FeedChange(seq=2, kind="tenant", key=TENANT, value=value))
        self._target = self.table.target(
            FunctionAddress(
                tenant=TenantId(TENANT), environment="main", app="shop", function=spec.name
            )
        )
        self._quotas = quotas

    def entry(self, key: str = "k-1", *, tenant: str = TENANT) -> AccessGrant:
        """The way of one caller."""
        return self.entrance.entry(
            Principal(
                KeyRecord(id=key, hash="", tenant=tenant, scope="invoke", quotas=self._quotas)
            ),
            self._target,
        )


def chat(text: str = "hello there", **more: Any) -> dict[str, Any]:
    """A chat's body."""
    return {"model": "hello", "messages": [{"role": "user", "content": text}], **more}


class Crowd:
    """So many calls wait."""

    def __init__(self) -> None:
        self.waiting = 0

    def of(self, _: object) -> int:
        return self.waiting

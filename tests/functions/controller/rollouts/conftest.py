"""A store with one function, its stable revision and a candidate; observations that come when told;
two clocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.deployments import app_registry
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.release import traffic
from pilotlight.controller.rollouts import lifecycle, repository
from pilotlight.controller.rollouts.loop import RolloutController
from pilotlight.controller.rollouts.plan import Gate, RolloutPlan
from pilotlight.controller.rollouts.repository import Rollout, StoredDecision
from pilotlight.controller.server import bootstrap
from pilotlight.controller.slo import observations
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json
from pilotlight.spec.traffic import TrafficDocument
from tests.functions.controller.parts import ManualClock, spec
from tests.functions.controller.rollouts.seen import observed

PLAN = RolloutPlan(
    steps=(5, 50, 100),
    every_s=60,
    min_samples=100,
    gates=(Gate(metric="error_ratio"),),
    progress_deadline_s=600,
)


@dataclass
class World:
    """What a rollout happens in. `clock` is the wall's, `steady` the monotonic one; `pass_s` moves
    both."""

    store: Store
    clock: ManualClock
    place: AppRef
    stable: str
    candidate: str
    steady: ManualClock = field(default_factory=lambda: ManualClock(0.0))
    posts: int = 0
    _keeper: RolloutController | None = None

    def begin(self, plan: RolloutPlan = PLAN) -> str:
        """Begin a rollout of the candidate."""
        with self.store.write() as write:
            return lifecycle.begin(
                write, self.place, function="hello", candidate=self.candidate, plan=plan
            )

    def look(self) -> int:
        """One round of the loop."""
        if self._keeper is None:
            self._keeper = RolloutController(
                store=self.store, clock=self.clock, monotonic=self.steady
            )
        return self._keeper.round()

    def restart(self) -> None:
        """The controller was killed; another one takes over with what is in the tables."""
        self._keeper = None

    def pass_s(self, seconds: float) -> None:
        """Time passes on both clocks."""
        self.clock.now += seconds
        self.steady.now += seconds

    def see(self, revision: str, calls: int, **more: Any) -> None:
        """An activator tells of calls of this minute."""
        self.posts += 1
        seen = observed(calls, **more)
        seen.tenant, seen.function_id, seen.revision = (
            self.place.tenant,
            self.place.function_id("hello"),
            revision,
        )
        seen.minute = int(self.clock.now // 60)
        post = {
            "activator": "a-1",
            "life": "x",
            "sequence": self.posts,
            "observations": [seen.to_json()],
        }
        with self.store.write() as write:
            assert observations.ingest_observations(write, post)

    def see_both(self, *, failed: int = 0, candidate: int = 500, stable: int = 9500) -> None:
        """Calls of both; `failed` of the candidate's."""
        self.see(self.candidate, candidate, failed=failed)
        self.see(self.stable, stable, failed=stable // 1000)

    @property
    def weights(self) -> dict[str, int]:
        """The traffic now."""
        return dict(self.document.weights)

    @property
    def document(self) -> TrafficDocument:
        """The traffic document now."""
        with self.store.read() as sql:
            return traffic.get(sql, self.place.function_id("hello"))

    def rollout(self, rollout: str) -> Rollout:
        """Where it is."""
        with self.store.read() as sql:
            return repository.find(sql, tenant=self.place.tenant, rollout=rollout)

    def decisions(self, rollout: str) -> list[StoredDecision]:
        """What was decided, newest first."""
        with self.store.read() as sql:
            return repository.decisions(sql, rollout)

    def told(self) -> list[str]:
        """Events that webhooks are told of, in their order."""
        with self.store.read() as sql:
            return list(
                sql.execute(
                    sa.select(tables.deliveries.c.event).order_by(tables.deliveries.c.at)
                ).scalars()
            )


@pytest.fixture
def world(store: Store, clock: ManualClock) -> World:
    """A function whose stable revision serves, and a candidate that was deployed before without
    traffic."""
    assert bootstrap.ensure_admin(store, uid_base=20_000)
    with store.write() as write:
        tenant = write.sql.execute(sa.select(tables.tenants.c.id)).scalar_one()
        place = AppRef(
            tenant=tenant,
            uid=20_000,
            environment="main",
            app="search",
            actor="k-1",
            request="req-1",
        )
        names = []
        for cpu in (2.0, 1.0):
            parsed = from_json(FunctionSpec, spec(resources={"cpu": cpu}))
            done = app_registry.deploy(write, place, specs=[parsed])
            names.append(done.functions[0].revision)
        row = {
            "tenant": tenant,
            "environment": "main",
            "name": "ops",
            "url": "https://ops.invalid/",
            "sealed_secret": "",
            "created_by": "k-1",
        }
        write.sql.execute(
            sa.insert(tables.webhooks).values(**row, events='["rollout.*"]', created_at=write.now)
        )
    return World(store=store, clock=clock, place=place, candidate=names[0], stable=names[1])

"""What builds of images cost: BUILD records, for the CPU time that their commands used, however
they ended; and proofs that a key asks for.

The node agent says now and then what a build has used so far (`snapshotter.images.images`). What is
new since the last record becomes one when the build, or its caller, is gone, and after each
CHARGE_NS of a long one: that much of each build under way is lost when the controller is killed.
Callers that share a build hear the same numbers; the first of them to leave pays up to there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import anyio
import anyio.to_thread

from pilotlight.controller import intake, prices
from pilotlight.controller.access import Principal
from pilotlight.controller.settings import ControllerConfig
from pilotlight.controller.store import Store
from pilotlight.pricing import ONE_CORE, Rates, kind_factor, price, rate_per_s
from pilotlight.protocol import UsageRecord

BUILD = "BUILD"
CHARGE_NS = 60 * 10**9
"""CPU time of a build after which a record is written although it goes on."""


REMEMBERED = 4096
"""Builds of which is known what was charged: far more than run at once, so that one which a caller
joins late is among them."""


@dataclass(slots=True)
class _Use:
    """Of one build: what was heard, and what was charged."""

    heard_ns: int = 0
    charged_ns: int = 0


class Builds:
    """What builds have used, and what of it was charged. Owner: the controller's event loop."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def __repr__(self) -> str:
        return f"<Builds {len(self._uses)} remembered>"

    def hear(self, build: str, cpu_ns: int) -> None:
        """It has used so much so far."""
        use = self._uses.setdefault(build, _Use())
        use.heard_ns = max(use.heard_ns, cpu_ns)
        if len(self._uses) > REMEMBERED:
            del self._uses[next(iter(self._uses))]

    def take(self, build: str, *, least_ns: int = 1) -> tuple[int, int]:
        """What is to be charged now, and what that makes in all; (0, …) below `least_ns`."""
        use = self._uses[build]
        owed = use.heard_ns - use.charged_ns
        if owed < least_ns:
            return 0, use.charged_ns
        use.charged_ns = use.heard_ns
        return owed, use.charged_ns


class BuildBill:
    """One caller's part in one build: hears what is used, and has it charged. Use it as an async
    context manager.

    Attributes:
        cpu_ns: what the build had used when it was last heard of.
    """

    def __init__(
        self, builds: Builds, store: Store, config: ControllerConfig, caller: Principal, what: str
    ) -> None:
        """`what`: is built or proven, for the record's `method`."""
        self._builds = builds
        self._store = store
        self._config = config
        self._caller = caller
        self._what = what
        self._build = ""
        self.cpu_ns = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._build:
            # the caller may be gone: the build was made for it all the same
            with anyio.CancelScope(shield=True):
                await self._charge(least_ns=1)

    async def hear(self, part: Mapping[str, Any]) -> bool:
        """Take what the agent says of the build's CPU time; False for any other part of its
        answer."""
        if "cpu_ns" not in part:
            return False
        self._build = str(part["build"])
        self.cpu_ns = int(part["cpu_ns"])
        self._builds.hear(self._build, self.cpu_ns)
        await self._charge(least_ns=CHARGE_NS)
        return True

    async def _charge(self, *, least_ns: int) -> None:
        owed_ns, charged_ns = self._builds.take(self._build, least_ns=least_ns)
        if owed_ns:
            await anyio.to_thread.run_sync(self._write, owed_ns, charged_ns)

    def _write(self, owed_ns: int, charged_ns: int) -> None:
        with self._store.write() as write:
            rates = prices.of_tenant(write.sql, self._config, self._caller.tenant)
            intake.take(write, [self._record(rates, owed_ns, charged_ns, now=write.now).to_json()])

    def _record(self, rates: Rates, owed_ns: int, charged_ns: int, *, now: float) -> UsageRecord:
        per_s = rate_per_s(ONE_CORE, rates) * kind_factor(BUILD, rates)
        return UsageRecord(
            id=f"{self._build}/{BUILD}/{charged_ns}",
            kind=BUILD,
            call="",
            attempt=0,
            tenant=self._caller.tenant,
            environment="",
            app="",
            function="",
            function_id="",
            method=self._what,
            revision="",
            instance=self._build,
            key=self._caller.key,
            start_kind="",
            started_at=now,
            queued_ms=0,
            start_ms=0,
            exec_ms=owed_ns // 10**6,
            billed_ns=owed_ns,
            cpu=ONE_CORE.cpu,
            memory_bytes=0,
            gpu=None,
            gpu_count=0,
            outcome="span",
            price_version=rates.version,
            currency=rates.currency,
            rate_per_s=str(per_s),
            cost=format(price(owed_ns, per_s), "f"),
        )

"""Charges for image builds: BUILD records for the CPU time that their commands used, successful or
not; and for snapshot verifications that a key requests.

The node agent periodically reports the CPU time that a build has used so far
(`snapshotter.images.images`). The time since the last record is charged when the build ends or its
caller disconnects, and after each CHARGE_NS of a long build; at most that much per running build is
lost when the controller is killed. Callers that share a build receive the same numbers; the first
one to disconnect pays for the time until then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import anyio
import anyio.to_thread

from pilotlight.controller.billing import price_lists, usage_ingestion
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.settings import ControllerConfig
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import ONE_CORE, Rates, kind_factor, rate_per_s

BUILD = "BUILD"
CHARGE_NS = 60 * 10**9
"""CPU time of a running build after which a record is written."""


REMEMBERED = 4096
"""Builds whose charges are kept in memory: far more than run at once, so that a build which a
caller joins late is among them."""


@dataclass(slots=True)
class _Use:
    """The reported and the charged CPU time of a build."""

    reported_ns: int = 0
    charged_ns: int = 0


class BuildUsage:
    """The CPU time that builds have used, and how much was charged. Owner: the controller's event
    loop."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def __repr__(self) -> str:
        return f"<BuildUsage {len(self._uses)} remembered>"

    def record_usage(self, build: str, cpu_ns: int) -> None:
        """Record the CPU time that a build has used so far."""
        use = self._uses.setdefault(build, _Use())
        use.reported_ns = max(use.reported_ns, cpu_ns)
        if len(self._uses) > REMEMBERED:
            del self._uses[next(iter(self._uses))]

    def charge(self, build: str, *, min_ns: int = 1) -> tuple[int, int]:
        """Mark the uncharged time as charged. Returns it and the total charged; (0, total) if it is
        below `min_ns`."""
        use = self._uses[build]
        owed = use.reported_ns - use.charged_ns
        if owed < min_ns:
            return 0, use.charged_ns
        use.charged_ns = use.reported_ns
        return owed, use.charged_ns


class BuildCharge:
    """One caller's part of one build: receives its usage reports and charges them. An async context
    manager.

    Attributes:
        cpu_ns: the CPU time that the build had used at its last report.
    """

    def __init__(
        self,
        builds: BuildUsage,
        store: Store,
        config: ControllerConfig,
        caller: Principal,
        what: str,
    ) -> None:
        """`what`: the name of what is built or verified, for the record's `method`."""
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
            # charge the caller even if it has disconnected
            with anyio.CancelScope(shield=True):
                await self._charge(min_ns=1)

    async def on_message(self, part: Mapping[str, Any]) -> bool:
        """Process the agent's report of the build's CPU time. Returns False for any other part of
        its response."""
        if "cpu_ns" not in part:
            return False
        self._build = str(part["build"])
        self.cpu_ns = int(part["cpu_ns"])
        self._builds.record_usage(self._build, self.cpu_ns)
        await self._charge(min_ns=CHARGE_NS)
        return True

    async def _charge(self, *, min_ns: int) -> None:
        owed_ns, charged_ns = self._builds.charge(self._build, min_ns=min_ns)
        if owed_ns:
            await anyio.to_thread.run_sync(self._write, owed_ns, charged_ns)

    def _write(self, owed_ns: int, charged_ns: int) -> None:
        with self._store.write() as write:
            rates = price_lists.of_tenant(write.sql, self._config, self._caller.tenant)
            usage_ingestion.ingest_usage(
                write, [self._record(rates, owed_ns, charged_ns, now=write.now).to_json()]
            )

    def _record(self, rates: Rates, owed_ns: int, charged_ns: int, *, now: float) -> UsageRecord:
        per_s = rate_per_s(ONE_CORE, rates) * kind_factor(BUILD, rates)
        return usage_ingestion.tenant_charge(
            f"{self._build}/{BUILD}/{charged_ns}",
            BUILD,
            rates=rates,
            per_s=per_s,
            billed_ns=owed_ns,
            tenant=self._caller.tenant,
            method=self._what,
            instance=self._build,
            key=self._caller.key,
            started_at=now,
            exec_ms=owed_ns // 10**6,
            cpu=ONE_CORE.cpu,
        )

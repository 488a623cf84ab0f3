"""Proofs of the price list."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from hashlib import sha256
from pathlib import Path

import pytest

from activator.billing.usage_pricing import UsageTemplate
from pilotlight.controller.billing import storage_charges
from pilotlight.controller.settings import ControllerConfig
from pilotlight.core.settings import SettingsInvalid, load_section
from pilotlight.spec.pricing import (
    GIB,
    ONE_CORE,
    Footprint,
    PriceSettings,
    billable_ns,
    kind_factor,
    price_duration,
    rate_per_s,
)
from tests.activator.billing_world import subject
from tests.functions.controller.conftest import Controller
from tests.options.contract import CLUSTER, LOCAL, proves

SECOND = 10**9


def lists_of(tmp_path: Path, text: str) -> PriceSettings:
    """Section `prices`, as both processes read it."""
    file = tmp_path / "platform.yaml"
    file.write_text(f"prices: {{{text}}}\n")
    return load_section(PriceSettings, "prices", file)


def cost(prices: PriceSettings, *, kind: str = "CALL", tokens: tuple[int, int] = (0, 0)) -> Decimal:
    """What a second costs an instance of two cores, a GiB and an H100."""
    footprint = Footprint(cpu=2.0, memory_bytes=GIB, gpu="H100", gpu_count=1)
    made = UsageTemplate(subject(), footprint=footprint, rates=prices.rates(), kind=kind)
    return Decimal(made.picos(SECOND, *tokens)) / 10**12


@proves(
    "PriceSettings.cpu_core_s",
    "PriceSettings.memory_gib_s",
    "PriceSettings.gpu_s",
    "PriceSettings.request",
    "PriceSettings.token_in",
    "PriceSettings.token_out",
)
def test_a_call_costs_what_the_list_says(fleet: str, tmp_path: Path) -> None:
    prices = lists_of(
        tmp_path,
        'cpu_core_s: "1", memory_gib_s: "10", gpu_s: {H100: "100"}, request: "1000", '
        'token_in: "10000", token_out: "100000"',
    )
    assert cost(prices, tokens=(2, 3)) == 2 * 1 + 10 + 100 + 1000 + 2 * 10_000 + 3 * 100_000


@proves("PriceSettings.start_factor", "PriceSettings.idle_factor", "PriceSettings.reserved_factor")
def test_starts_and_idle_time_cost_their_share(fleet: str, tmp_path: Path) -> None:
    text = 'start_factor: "0.5", idle_factor: "0.25", reserved_factor: "0.125"'
    prices = lists_of(tmp_path, text)
    whole = cost(prices)
    shares = {kind: cost(prices, kind=kind) / whole for kind in ("START", "IDLE", "RESERVED")}
    assert {kind: round(share, 6) for kind, share in shares.items()} == {
        "START": Decimal(prices.start_factor),
        "IDLE": Decimal(prices.idle_factor),
        "RESERVED": Decimal(prices.reserved_factor),
    }


@proves("PriceSettings.cpu_factor", "PriceSettings.build_factor", fleets=(LOCAL,))
def test_cpu_time_outside_calls_and_of_builds_costs_its_share(fleet: str, tmp_path: Path) -> None:
    prices = lists_of(tmp_path, 'cpu_core_s: "8", cpu_factor: "0.5", build_factor: "0.25"')
    rates = prices.rates()
    second = price_duration(SECOND, rate_per_s(ONE_CORE, rates))
    assert second * kind_factor("CPU", rates) == 4 == 8 * Decimal(prices.cpu_factor)
    assert second * kind_factor("BUILD", rates) == 2 == 8 * Decimal(prices.build_factor)


@proves(
    "PriceSettings.cpu_factor",
    "PriceSettings.build_factor",
    "PriceSettings.snapshot_gib_month",
    fleets=(CLUSTER,),
)
@pytest.mark.parametrize("key", ["cpu_factor", "build_factor", "snapshot_gib_month"])
def test_prices_of_what_pods_do_not_meter_are_refused_at_the_start(
    fleet: str, tmp_path: Path, key: str
) -> None:
    file = tmp_path / "platform.yaml"
    for section in (f'{{{key}: "0.5"}}', f'{{others: {{x: {{{key}: "0.5"}}}}}}'):
        file.write_text(f"platform: {{fleet: knative}}\nprices: {section}\n")
        with pytest.raises(SettingsInvalid, match=rf'{key} = "0.5": on a cluster'):
            ControllerConfig.read(file)
        file.write_text(f"platform: {{fleet: local}}\nprices: {section}\n")
        ControllerConfig.read(file)


async def storage_cost(controller: Controller, tmp_path: Path, prices: PriceSettings) -> list[str]:
    """What is charged in an hour for weights and a snapshot of the first tenant."""
    from tests.functions.controller.parts import snapshot
    from tests.functions.controller.test_storage import push

    directory = tmp_path / "pushed"
    directory.mkdir()
    await push(controller.http, directory, "one", b"1" * 100_000)
    config = replace(controller.context.config, prices=prices)
    info = snapshot(await controller.tenant(), image_bytes=GIB)
    with controller.context.store.write() as write:
        storage_charges.charge_storage(write, config, snapshots=[info])
    from pilotlight.controller.database import tables

    with controller.context.store.read() as sql:
        return sorted(sql.execute(tables.usage.select()).mappings(), key=str)  # type: ignore[arg-type]


@proves("PriceSettings.weights_gib_month")
async def test_stored_weights_cost_their_price(
    fleet: str, controller: Controller, tmp_path: Path
) -> None:
    rows = await storage_cost(controller, tmp_path, PriceSettings(weights_gib_month="1000000"))
    assert [row["method"] for row in rows] == ["weights"]  # type: ignore[index]


@proves("PriceSettings.volumes_gib_month")
async def test_stored_volumes_cost_their_price(
    fleet: str, controller: Controller, tmp_path: Path
) -> None:
    await controller.http.put(f"/v1/volume-chunks/{sha256(b'x').hexdigest()}", content=b"x")
    rows = await storage_cost(controller, tmp_path, PriceSettings(volumes_gib_month="1000000"))
    assert [row["method"] for row in rows] == ["volumes"]  # type: ignore[index]


@proves("PriceSettings.snapshot_gib_month", fleets=(LOCAL,))
async def test_stored_snapshots_cost_their_price(
    fleet: str, controller: Controller, tmp_path: Path
) -> None:
    rows = await storage_cost(controller, tmp_path, PriceSettings(snapshot_gib_month="1000000"))
    assert [row["method"] for row in rows] == ["snapshots"]  # type: ignore[index]


@proves("PriceSettings.minimum_ms", "PriceSettings.rounding_ms")
def test_durations_are_rounded_up(fleet: str, tmp_path: Path) -> None:
    rates = lists_of(tmp_path, "minimum_ms: 50, rounding_ms: 20").rates()
    assert [billable_ns(ms * 10**6, rates) // 10**6 for ms in (1, 50, 61)] == [60, 60, 80]
    assert (rates.minimum_ms, rates.rounding_ms) == (50, 20)


@proves("PriceSettings.version", "PriceSettings.currency", "PriceSettings.others")
async def test_lists_are_recorded_by_version(fleet: str, controller: Controller) -> None:
    from pilotlight.controller.billing import price_lists

    prices = PriceSettings(version="v-9", currency="EUR", others={"partner": {"cpu_core_s": "7"}})
    with controller.context.store.write() as write:
        assert price_lists.record_price_lists(write, prices.lists()) == ["v-9", "partner"]
    changed = replace(prices, cpu_core_s="9").lists()
    with controller.context.store.write() as write:  # noqa: SIM117
        with pytest.raises(SettingsInvalid, match="v-9"):
            price_lists.record_price_lists(write, changed)
    with controller.context.store.read() as sql:
        shown = {row["version"]: row for row in price_lists.listing(sql)}
    assert shown["v-9"]["currency"] == "EUR"
    assert shown["partner"]["cpu_core_s"] == "7"

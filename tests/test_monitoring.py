"""deploy/monitoring: promtool accepts and proves the rules, Grafana's files are well formed, and
what they ask for is really exported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import yaml
from prometheus_client import CollectorRegistry

from activator.billing.shipping import Lag
from activator.calls.call import AnsweredCall
from activator.coordination.state import SharedStatistics
from activator.llm.engine_metrics import EngineMetrics
from activator.llm.engine_state import EngineState
from activator.metrics.metrics import Metrics as ActivatorMetrics
from activator.prediction_log.pipeline import PredictionLogs
from activator.quotas.token_reservation import TokenReservation
from pilotlight.controller.server.metrics import DriftSeries
from pilotlight.controller.server.metrics import Metrics as ControllerMetrics
from pilotlight.controller.slo.burn_rate import BURN_RATE_ALERTS
from pilotlight.controller.slo.slo_alerts import QUIET_S
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.errors import BudgetReserved, OverQuota, Shed
from pilotlight.spec.policies import Objectives
from snapshotter.metrics import Metrics as AgentMetrics
from snapshotter.types import SnapshotState, StartKind
from tests.fakes.calls import call_of
from tests.fakes.routes import spec_of, target_of
from tests.weight_cache.served import node_with_client
from weight_cache.metrics import StoreCollector, TierCollector

MONITORING = Path(__file__).parents[1] / "deploy" / "monitoring"
RULES = MONITORING / "rules.yml"
RULES_TESTS = sorted(MONITORING.glob("rules*_test.yml"))
DASHBOARDS = sorted((MONITORING / "grafana").glob("*.json"))
PANELS = frozenset({"row", "stat", "timeseries", "bargauge", "table"})
UNITS = frozenset({"short", "reqps", "cps", "percentunit", "s", "bytes", "Bps"})
GRID_WIDTH = 24
FROM_PROMETHEUS = frozenset({"job", "instance"})
"""Labels that a scrape adds."""

Exported = Mapping[str, frozenset[str]]
RequireOrSkip = Callable[[str], NoReturn]


@pytest.fixture(name="promtool")
def _promtool(require_or_skip: RequireOrSkip) -> Callable[..., str]:
    program = shutil.which("promtool")
    if program is None:
        require_or_skip("promtool is not installed (scripts/install-system-packages test)")

    def run(*arguments: str | Path) -> str:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
            cwd=MONITORING,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(name="exported", scope="module")
def _exported() -> Exported:
    """Every sample that the four processes can export, with its labels. `up` is Prometheus' own."""
    found: dict[str, set[str]] = {"up": set()}
    for families in (_activator(), _controller(), _agent(), _weights()):
        for family in families:
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    for record, expression in (
        (rule["record"], rule["expr"]) for rule in _rules() if "record" in rule
    ):
        by = re.search(r"sum by \(([^)]*)\)", expression)
        found[record] = {label.strip() for label in by[1].split(",")} - {"le"} if by else set()
    return {name: frozenset(labels) for name, labels in found.items()}


def _activator() -> Iterator[Any]:
    metrics = ActivatorMetrics()
    target = target_of(spec_of("f", objectives=Objectives()), app="a", tenant="t-1")
    started: Any = SimpleNamespace(start_kind=StartKind.FORK, phases_ms={"fork": 1.0})
    call = call_of(target, b"", key_id="k-1")
    call.start_ms, call.start_kind = 1.0, StartKind.FORK
    answer = SimpleNamespace(status=200, body=b"{}", header=lambda _: b"ok")
    attempt: Any = AnsweredCall(call)
    attempt.answer, attempt.exec_ms, attempt.picos = answer, 1.0, 1
    metrics.answered(attempt, 200)
    metrics.observer.drain(0)
    for error in (
        OverQuota("", of="key", quota="concurrent"),
        Shed("", priority="batch"),
        BudgetReserved(""),
    ):
        metrics.count_rejected(error, "t-1")
    metrics.waited("batch", 1.0)
    metrics.instance_ready(target, started, 1.0)
    metrics.start_failed(target, "exited")
    metrics.instance_lost(target, "out_of_memory")
    use = TokenReservation(estimated_in=1, max_out=2, began_ns=0)
    use.on_piece(1)
    use.on_piece(2)
    use.on_usage(1, 2, 1)
    use.on_finish("stop")
    metrics.language.ended(target, use, StartKind.WARM)
    reading = EngineMetrics(running=1, waiting=1, kv_use=0.5)
    view = EngineState(
        at=0.0,
        slots=1,
        running=1,
        waiting=1,
        kv_use=0.5,
        prefix_hit_rate=0.5,
        prompt_tokens_per_s=1.0,
        generation_tokens_per_s=1.0,
        peak_prompt_tokens_per_s=None,
        reading=reading,
    )
    metrics.language.collect_engines(lambda: {"i-1": (target, view)})
    metrics.collect_journal(lambda: Lag(records=0, seconds=0.0))
    metrics.collect_instances(lambda: {("t-1", "a", "f", "idle"): 1})
    metrics.collect_waiting(lambda: {("t-1", "batch"): 1})
    metrics.collect_tenants(lambda: {"t-1": "acme"})
    metrics.collect_autoscaler(lambda: True)
    metrics.collect_shared(
        lambda: SharedStatistics(members=1, allowance={"r": 1}, refused=0, is_reachable=True)
    )
    predictions = PredictionLogs(
        directory=Path("predictions"),
        controller=Endpoint.at(Path("controller.sock")),
        token="t",
        max_bytes=1,
        ship_s=1.0,
    )
    metrics.registry.register(predictions)
    yield from metrics.registry.collect()


def _controller() -> Iterator[Any]:
    metrics = ControllerMetrics()
    metrics.requests.labels("/v1/apps", "200").inc()
    metrics.request_seconds.labels("/v1/apps").observe(1)
    metrics.alerts.labels("given-up").inc()
    metrics.record_spend("t-1", "USD", 1)
    metrics.set_budget_used("t-1", "b-1", 0.5)
    labels = ("t-1", "main", "a", "f")
    metrics.set_drift([DriftSeries(labels=labels, drifted=1, max_psi=0.3, broken=0)])
    yield from metrics.registry.collect()


def _agent() -> Iterator[Any]:
    metrics = AgentMetrics()
    metrics.started(StartKind.FORK, 1.0, {"fork": 1.0})
    metrics.observe(by_state={}, templates=0, template_pss_bytes=0, parked=0)
    metrics.observe_snapshots(by_state=dict.fromkeys(SnapshotState, 0), used_bytes=0)
    yield from metrics.registry.collect()
    # What was not counted yet has no samples, but its names and labels are there.
    for name, labels in {
        "pilotlight_rung_failures_total": {"rung", "reason"},
        "pilotlight_snapshot_misses_total": {"field"},
        "pilotlight_start_prediction_ratio_bucket": {"kind", "le"},
    }.items():
        assert name.removesuffix("_total").removesuffix("_bucket") in {
            family.name for family in metrics.registry.collect()
        }
        yield SimpleNamespace(
            samples=[SimpleNamespace(name=name, labels=dict.fromkeys(labels, ""))]
        )


def _weights() -> list[Any]:
    import asyncio

    async def collect() -> list[Any]:
        async with node_with_client() as (_, cache, _client):
            registry = CollectorRegistry()
            registry.register(StoreCollector(cache.store.statistics))
            registry.register(
                TierCollector(leases=cache.leases, bandwidths=cache.bandwidths, ahead=cache.ahead)
            )
            return list(registry.collect())

    return asyncio.run(collect())


def _rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


_NAME = re.compile(
    r"(?<![\w:$\"/-])((?:(?:tenant|function):)?pilotlight_[a-z0-9_]+(?::[a-z0-9_]+)?|up(?=\{))(\{[^}]*\})?"
)


def asked_for(expression: str) -> Iterator[tuple[str, set[str]]]:
    """(metric, labels of its selector) of every series that a query reads."""
    for match in _NAME.finditer(expression):
        yield match[1], set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", match[2] or ""))


def test_promtool_accepts_the_rules_and_the_example_configuration(
    promtool: Callable[..., str], tmp_path: Path
) -> None:
    promtool("check", "rules", "rules.yml")
    for name in ("prometheus.yml", "rules.yml"):
        shutil.copy(MONITORING / name, tmp_path)
    (tmp_path / "metrics.token").write_text("a-token-of-the-platform")
    promtool("check", "config", tmp_path / "prometheus.yml")


@pytest.mark.slow  # Prometheus's own test runner
def test_every_alert_fires_when_it_should_and_not_before(promtool: Callable[..., str]) -> None:
    promtool("test", "rules", *(file.name for file in RULES_TESTS))

    tested: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    for case in (
        case for file in RULES_TESTS for case in yaml.safe_load(file.read_text())["tests"]
    ):
        for check in case["alert_rule_test"]:
            (fired if check.get("exp_alerts") else tested)[check["alertname"]] += 1
    alerts = {rule["alert"] for rule in _rules() if "alert" in rule}
    assert set(fired) == alerts
    assert set(tested) == alerts


def test_objectives_are_judged_by_the_same_numbers_inside_and_outside() -> None:
    rules = {rule["alert"]: " ".join(rule["expr"].split()) for rule in _rules() if "alert" in rule}
    kept = {rule["alert"]: rule.get("keep_firing_for") for rule in _rules() if "alert" in rule}
    for alarm in BURN_RATE_ALERTS:
        name = f"PilotlightObjective{alarm.severity.value.title()}"
        long, short = alarm.name.split("/")
        burning = " and ".join(
            f"function:pilotlight_slo_burn:{window} > {alarm.factor:g}" for window in (long, short)
        )
        enough = (
            f"function:pilotlight_slo_bad:{long} >= {alarm.min_bad_long} and "
            f"function:pilotlight_slo_bad:{short} >= {alarm.min_bad_short} "
            f"and function:pilotlight_slo_calls:{long} >= {alarm.min_total}"
        )
        assert f"{burning} and {enough}" in rules[name]
        assert kept[name] == f"{QUIET_S[alarm.severity] // 60}m"


def test_every_alert_says_what_is_wrong_what_to_do_and_for_whom() -> None:
    for rule in _rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("page", "ticket", "info"), rule["alert"]
            assert {"summary", "description"} == set(rule["annotations"]), rule["alert"]


def test_rules_ask_for_what_is_exported(exported: Exported) -> None:
    for rule in _rules():
        _check_known(rule["expr"], exported, rule.get("alert") or rule["record"])


def test_the_example_scrapes_the_addresses_that_platform_yaml_suggests_under_the_jobs_that_rules_name() -> (
    None
):
    jobs = {
        job["job_name"]: job["static_configs"][0]["targets"]
        for job in yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    }
    text = (MONITORING.parents[1] / "platform.yaml").read_text()
    sections = {
        part.partition(":")[0]: part for part in re.split(r"^(?=\w)", text, flags=re.MULTILINE)
    }
    suggested = {
        name: re.findall(r"metrics_listen: null .*such as ([\d.]+:\d+)", sections[name])
        for name in ("activator", "controller", "snapshotter", "weight_cache")
    }

    assert jobs == suggested


def test_the_example_scrapes_with_the_token() -> None:
    for job in yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]:
        assert job["authorization"] == {"type": "Bearer", "credentials_file": "metrics.token"}, job[
            "job_name"
        ]


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_a_dashboard_asks_for_what_is_exported(file: Path, exported: Exported) -> None:
    board = json.loads(file.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            _check_known(target["expr"], exported, panel["title"])
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            _check_known(variable["query"]["query"], exported, variable["name"])


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_promtool_understands_every_query_of_a_dashboard(
    file: Path, promtool: Callable[..., str], tmp_path: Path
) -> None:
    queries = [
        target["expr"]
        for panel in json.loads(file.read_text())["panels"]
        for target in panel.get("targets", ())
    ]
    plain = [re.sub(r"\$\w+", "x", query.replace("$__rate_interval", "5m")) for query in queries]
    rules = tmp_path / "queries.yml"
    rules.write_text(
        yaml.safe_dump(
            {
                "groups": [
                    {
                        "name": "g",
                        "rules": [
                            {"record": f"q{i}", "expr": query} for i, query in enumerate(plain)
                        ],
                    }
                ]
            }
        )
    )

    promtool("check", "rules", rules)


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_a_dashboard_is_one_that_grafana_imports(file: Path) -> None:
    board = json.loads(file.read_text())

    assert board["id"] is None, "an import gets its number from Grafana"
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", board["uid"])
    assert isinstance(board["schemaVersion"], int)
    assert {"title", "tags", "time", "refresh", "timezone", "annotations", "links"} <= set(board)
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for panel in board["panels"]:
        assert panel["type"] in PANELS
        if panel["type"] != "row":
            _check_panel(panel, set(variables))
    _check_layout(board["panels"])


def _check_panel(panel: Mapping[str, Any], variables: set[str]) -> None:
    where = panel["title"]
    assert panel["title"], "a panel without a title"
    assert panel["description"], where
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, where
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, where
    assert panel["targets"], where
    references = [target["refId"] for target in panel["targets"]]
    assert len(references) == len(set(references)), where
    for target in panel["targets"]:
        used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
        assert used <= variables, f"{where}: {used - variables}"
        legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert legend <= _grouped(target["expr"]), (
            f"{where}: the legend names {legend}, the query groups by {_grouped(target['expr'])}"
        )


def _grouped(expression: str) -> set[str]:
    kept = {"instance"} if " by " not in expression else set()
    for group in re.findall(r"(?:by|group_left) \(([^)]*)\)", expression):
        kept |= {label.strip() for label in group.split(",")}
    return kept


def _check_layout(panels: list[dict[str, Any]]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= GRID_WIDTH
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells


def _check_known(expression: str, exported: Exported, where: str) -> None:
    names = list(asked_for(expression))
    assert names, f"{where}: no metric in {expression!r}"
    for name, labels in names:
        assert name in exported, f"{where}: nothing exports {name}"
        assert labels <= exported[name] | FROM_PROMETHEUS, (
            f"{where}: {name} has no label {sorted(labels - exported[name])}"
        )


def test_a_query_is_taken_apart_into_its_series() -> None:
    query = (
        'sum by (tenant) (rate(pilotlight_a_total{x="1",y=~"b"}[5m])) / up{job="c"} and '
        "tenant:pilotlight_b:rate5m > 1"
    )

    assert list(asked_for(query)) == [
        ("pilotlight_a_total", {"x", "y"}),
        ("up", {"job"}),
        ("tenant:pilotlight_b:rate5m", set()),
    ]

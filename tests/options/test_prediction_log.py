"""Proofs of prediction logs: through an activator, and through what its process makes of its
settings."""

from __future__ import annotations

from pathlib import Path

from activator.prediction_log.queue import PredictionQueue
from activator.prediction_log.writer import make_row
from pilotlight.controller.predictions.files import PredictionFile
from pilotlight.spec.prediction_log import HOUR_S, Content, PredictionLogSpec
from tests.activator.conftest import Edge
from tests.activator.prediction_log.test_spool import Disk
from tests.fakes.routes import route_of, spec_of
from tests.options.contract import proves
from tests.options.test_activator_settings import app_of

KEY = b"k" * 32


@proves("PredictionLogSpec.sample")
async def test_a_share_of_the_calls_is_logged(fleet: str, edge: Edge) -> None:
    drawn = iter([0.4, 0.6])
    queue = PredictionQueue(draw=lambda: next(drawn))
    edge.log_calls(queue)
    edge.add(route_of(spec_of("hello", log=PredictionLogSpec(sample=0.5))))
    edge.add(route_of(spec_of("quiet")))
    for path in ("shop/hello:invoke", "shop/quiet:invoke", "shop/hello:invoke"):
        assert (await edge.call(path, json={"x": 1})).status_code == 200
    assert [row.facts["function"] for row in queue.pop_batch()] == ["hello"]


@proves("PredictionLogSpec.inputs", "PredictionLogSpec.outputs", "PredictionLogSpec.scrub")
async def test_rows_have_what_is_declared(fleet: str, edge: Edge) -> None:
    queue = PredictionQueue()
    edge.log_calls(queue)
    for name, log in (
        ("inputs", PredictionLogSpec(sample=1, inputs=Content.FULL, outputs=Content.NONE)),
        ("scrub", PredictionLogSpec(sample=1, outputs=Content.FULL, scrub=("$.x",))),
    ):
        edge.add(route_of(spec_of(name, log=log)))
        assert (await edge.call(f"shop/{name}:invoke", json={"x": 7})).status_code == 200
    first, second = (make_row(row, KEY).decode() for row in queue.pop_batch())
    assert '"input":"{\\"x\\":7}"' in first
    assert '"output_summary":null,"output":null' in first
    assert '"output":"{\\"x\\":\\"[scrubbed]\\"}"' in second
    assert '"input":null' in second
    assert "7" not in second.partition("input_summary")[2].partition("request_id")[0]


@proves("PredictionLogSpec.keep_s")
async def test_files_have_the_window_that_is_declared(
    fleet: str, edge: Edge, tmp_path: Path
) -> None:
    queue = PredictionQueue()
    edge.log_calls(queue)
    edge.add(route_of(spec_of(log=PredictionLogSpec(sample=1, keep_s=5 * HOUR_S))))
    await edge.call(json={"x": 1})
    (row,) = queue.pop_batch()
    disk = Disk(tmp_path)
    disk.append(b"{}", tenant="t", function="f", at_s=7.0, keep_s=row.facts["log"]["keep_s"])
    disk.close()
    (path,) = (tmp_path / "ready").iterdir()
    assert PredictionFile.parse(path.name).expires_at == HOUR_S + 5 * HOUR_S


@proves("ActivatorSettings.prediction_log_bytes", "ActivatorSettings.prediction_log_ship_s")
async def test_the_writer_has_its_bounds(fleet: str, short_tmp: Path) -> None:
    async with app_of(
        short_tmp, fleet, prediction_log_bytes=2**21, prediction_log_ship_s=7.5
    ) as app:
        assert f"at most {2**21} bytes, ships each 7.5 s" in repr(app.predictions.writer)
        assert app.runner.predictions is app.predictions.queue

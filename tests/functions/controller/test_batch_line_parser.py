"""The controller's side of the process that parses batch files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import uvloop

from pilotlight.controller.batches.line_parser import LineParser
from pilotlight.errors import Unavailable
from tests.fakes.waiting import until

URL = "/v1/functions/search/hello:invoke"
LINE = {"custom_id": "c1", "method": "POST", "url": URL, "body": {"name": "n1"}}


def test_a_process_that_was_killed_between_requests_is_replaced() -> None:
    """The controller's event loop is uvloop's: it raises RuntimeError where asyncio has OSError."""

    async def story() -> None:
        parser = LineParser()
        parse = partial(parser.parse, json.dumps(LINE).encode(), endpoint=URL, is_openai=False)
        first = await parse()
        killed = parser.pid
        os.kill(killed, signal.SIGKILL)
        await until(lambda: not Path(f"/proc/{killed}").exists())
        await asyncio.sleep(0.05)
        with pytest.raises(Unavailable, match="has ended"):
            await parse()
        assert await parse() == first
        await parser.aclose()

    uvloop.run(story())

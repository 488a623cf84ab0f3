"""A batch on a whole platform whose processes are killed while it runs: each line is answered once
and paid once."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import openai
import pytest

from tests.e2e.harness import PlatformUnderTest, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
LINES = 150
ENDPOINT: Any = "/v1/functions/work/again:invoke"


def client_of(platform: PlatformUnderTest) -> openai.OpenAI:
    key = platform.headers["authorization"].removeprefix("Bearer ")
    return openai.OpenAI(api_key=key, base_url=f"{platform.url}/v1", max_retries=5, timeout=60)


def test_processes_are_killed_under_a_batch(mortal_platform: PlatformUnderTest) -> None:
    platform = mortal_platform
    platform.deploy("work.py")
    client = client_of(platform)
    rows = [
        {"custom_id": f"c{n}", "method": "POST", "url": ENDPOINT, "body": {"n": n}}
        for n in range(LINES)
    ]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    file = client.files.create(file=("naps.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")

    def completed() -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts.completed if counts is not None else 0

    for process, share in (("activator", 10), ("controller", 40), ("activator", 80)):
        wait_for(lambda share=share: completed() >= share, f"{share} answers")  # type: ignore[misc]
        platform.wait_restarted(process, platform.kill(process))
        time.sleep(0.5)

    def is_over() -> bool:
        return client.batches.retrieve(batch.id).status == "completed"

    wait_for(is_over, "the batch to end", timeout_s=60)
    done = client.batches.retrieve(batch.id)
    assert done.error_file_id is None, client.files.content(done.error_file_id).text
    assert done.output_file_id is not None
    answers = [json.loads(one) for one in client.files.content(done.output_file_id).iter_lines()]
    assert Counter(one["custom_id"] for one in answers) == Counter(f"c{n}" for n in range(LINES))
    calls = {one["response"]["request_id"] for one in answers}
    assert len(calls) == LINES

    def paid() -> Counter[str]:
        return Counter(
            one["call"]
            for one in platform.usage("kind = 'CALL' AND outcome = 'ok'")
            if one["call"] in calls
        )

    wait_for(lambda: len(paid()) == LINES, "all lines to be in the ledger")
    assert set(paid().values()) == {1}
    platform.cli("app", "delete", "work", "--yes")

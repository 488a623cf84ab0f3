"""Each example: deployed to a real platform and called; and its pure part, here."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient
from websockets.sync.client import connect

import pilotlight
from examples import asgi, batch_file, batched, embed, features, guard, hello, stream, tabular
from tests.e2e.harness import PlatformUnderTest
from tests.fakes.host_address import host_address
from tests.fakes.redis_server import ReachableRedis

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.timeout(240)


def deploy(platform: PlatformUnderTest, file: str) -> None:
    platform.cli("deploy", str(EXAMPLES / file), "--no-wait")


def invoke(
    platform: PlatformUnderTest, function: str, arguments: Any, accept: str = "application/json"
) -> httpx.Response:
    url = f"{platform.url}/v1/functions/{function}:invoke"
    answer = httpx.post(
        url, json=arguments, headers={**platform.headers, "accept": accept}, timeout=120
    )
    assert answer.status_code == 200, f"{answer.status_code} {answer.text}\n{platform.log_tails()}"
    return answer


# -- here ------------------------------------------------------------------------------------------
def test_hello_greets() -> None:
    assert hello.hello.local("Ada") == "Hello, Ada!"


def test_stream_counts_and_squares() -> None:
    assert list(stream.count.local(3)) == [{"number": n, "square": n * n} for n in (1, 2, 3)]


def test_the_judge_of_a_guard_knows_one_word() -> None:
    assert guard.judge.local(stage="input", text="Hello") == {"allow": True}
    assert guard.judge.local(stage="output", text="Silly you") == {"allow": False, "rule": "rude"}
    assert guard.GUARD.function == "guarded/judge"


def test_cosine_of_equal_opposite_and_orthogonal_vectors() -> None:
    assert embed.cosine([3.0, 4.0], [3.0, 4.0]) == pytest.approx(1.0)
    assert embed.cosine([1.0, 0.0], [-2.0, 0.0]) == pytest.approx(-1.0)
    assert embed.cosine([1.0, 0.0], [0.0, 5.0]) == 0.0


def test_the_same_vector_up_to_rounding_proves_a_snapshot_and_another_does_not() -> None:
    assert embed.close([0.6, 0.8], [0.6000001, 0.8])
    assert not embed.close([0.6, 0.8], [0.8, 0.6])


def test_synthetic_clicks_are_the_same_every_time() -> None:
    first, second = tabular.synthetic_clicks(50), tabular.synthetic_clicks(50)
    assert (first[0] == second[0]).all()
    assert (first[1] == second[1]).all()
    assert first[0].shape == (50, len(tabular.FEATURES))


def test_the_site_answers_without_a_platform() -> None:
    with TestClient(asgi.site.local()) as browser:
        assert browser.get("/items/7?q=x").json() == {"item_id": 7, "q": "x"}
        with browser.websocket_connect("/echo") as socket:
            socket.send_text("hello")
            assert socket.receive_text() == "hello"


# -- on a platform ---------------------------------------------------------------------------------
def test_hello_answers_with_its_start_its_times_and_its_cost(platform: PlatformUnderTest) -> None:
    deploy(platform, "hello.py")
    answer = invoke(platform, "hello/hello", {"name": "Ada"})
    assert answer.json() == "Hello, Ada!"
    assert answer.headers["pilotlight-start"] in ("COLD", "FORK", "WARM")
    assert "exec" in answer.headers["server-timing"]
    assert float(answer.headers["pilotlight-cost"]) > 0


def test_pipeline_fans_out_and_goes_on_in_the_background(platform: PlatformUnderTest) -> None:
    deploy(platform, "pipeline.py")
    texts = {"texts": ["to be or not to be", "to do"]}
    counted = {"to": 3, "be": 2, "or": 1, "not": 1, "do": 1}
    assert invoke(platform, "pipeline/count", texts).json() == counted
    submitted = invoke(platform, "pipeline/submit", texts).json()
    with platform.client() as client:
        record = client.call(submitted, wait_s=30)
    assert (record.state, record.labels["caller"]) == ("SUCCEEDED", "pipeline/submit")


def test_stream_sends_items_as_lines_and_as_events(platform: PlatformUnderTest) -> None:
    deploy(platform, "stream.py")
    lines = invoke(platform, "stream/count", {"upto": 3}, "application/x-ndjson").text.splitlines()
    assert [json.loads(line)["square"] for line in lines] == [1, 4, 9]
    events = invoke(platform, "stream/count", {"upto": 2}, "text/event-stream").text
    assert '"square": 4' in events or '"square":4' in events


def test_asgi_serves_http_and_websocket(platform: PlatformUnderTest) -> None:
    deploy(platform, "asgi.py")
    answer = httpx.get(
        f"{platform.url}/fn/web/site/items/3",
        params={"q": "y"},
        headers=platform.headers,
        timeout=120,
    )
    assert answer.json() == {"item_id": 3, "q": "y"}
    address = f"{platform.url.replace('http', 'ws', 1)}/fn/web/site/echo"
    with connect(address, additional_headers=platform.headers, open_timeout=30) as socket:
        socket.send("over the wire")
        assert socket.recv(timeout=30) == "over the wire"


def test_embed_knows_what_belongs_together(platform: PlatformUnderTest) -> None:
    deploy(platform, "embed.py")
    texts = ["A man is eating food.", "A man eats a meal.", "The stock market fell today."]
    meal, dinner, market = invoke(platform, "search/Embedder.embed_all", {"texts": texts}).json()
    assert len(meal) == 384
    assert math.hypot(*meal) == pytest.approx(1.0, abs=1e-5)
    assert embed.cosine(meal, dinner) > 0.85
    assert embed.cosine(meal, market) < 0.2


def test_single_sentences_share_passes_and_an_empty_one_fails_alone(
    platform: PlatformUnderTest,
) -> None:
    deploy(platform, "batched.py")
    texts = ["A man is eating food.", "A man eats a meal.", "The stock market fell today.", " "]
    url = f"{platform.url}/v1/functions/batches/Embedder.embed:invoke"
    with (
        ThreadPoolExecutor(len(texts)) as callers,
        httpx.Client(headers=platform.headers, timeout=120) as client,
    ):
        answers = list(callers.map(lambda text: client.post(url, json={"texts": text}), texts))

    assert [answer.status_code for answer in answers] == [200, 200, 200, 500], platform.log_tails()
    meal, dinner, market = (answer.json() for answer in answers[:3])
    assert batched.close(meal, meal)
    assert embed.cosine(meal, dinner) > 0.85
    assert embed.cosine(meal, market) < 0.2
    assert answers[3].json()["error"] == {"type": "ValueError", "message": "the text is empty"}


def test_open_inference_takes_arrays_and_bytes_as_they_are(platform: PlatformUnderTest) -> None:
    deploy(platform, "open_inference.py")
    file = io.BytesIO()
    np.save(file, np.full((2, 3, 3), 7, np.uint8))
    for function, body, kind in (
        ("grayscale", file.getvalue(), "application/x-npy"),
        ("reverse", b"desserts", "application/octet-stream"),
    ):
        answer = httpx.post(
            f"{platform.url}/v1/functions/vision/{function}:invoke",
            content=body,
            headers={**platform.headers, "content-type": kind, "accept": kind},
            timeout=120,
        )
        assert (answer.status_code, answer.headers["content-type"]) == (200, kind), answer.text
        if function == "grayscale":
            gray = np.load(io.BytesIO(answer.content), allow_pickle=False)
            assert (gray.dtype, gray.tolist()) == (np.uint8, [[7, 7, 7], [7, 7, 7]])
        else:
            assert answer.content == b"stressed"


def test_tabular_ranks_the_better_candidate_first(platform: PlatformUnderTest) -> None:
    deploy(platform, "tabular.py")
    far = {"price": 190.0, "rating": 1.5, "distance_km": 12.0, "is_new": False}
    near = {"price": 15.0, "rating": 4.8, "distance_km": 0.5, "is_new": True}
    ranked = invoke(platform, "ranking/Ranker.rank", {"candidates": [far, near]}).json()
    assert [score["index"] for score in ranked] == [1, 0]
    assert ranked[0]["score"] > 0.9
    assert ranked[1]["score"] < 0.2


@pytest.mark.soak
def test_canary_plays_a_good_release_and_a_bad_one(tmp_path: Path) -> None:
    picture = tmp_path / "canary.svg"

    run = subprocess.run(
        [
            sys.executable,
            str(EXAMPLES / "canary" / "play.py"),
            "--quick",
            "--picture",
            str(picture),
        ],
        # what a shell exported for another platform is not heeded
        env={
            **os.environ,
            "PILOTLIGHT_URL": "http://127.0.0.1:9",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"done: 100 % on v2-", run.stdout), run.stdout
    assert re.search(r"rolled_back: 0 % on v3-", run.stdout), run.stdout
    assert re.search(r"v2-\w+ +\d+ calls, 0 failed", run.stdout), run.stdout
    assert "rolled_back" in picture.read_text()


def test_predictions_are_logged_without_who_they_are_about_and_replayed(
    platform: PlatformUnderTest, tmp_path: Path
) -> None:
    deploy(platform, "predictions.py")
    calls = {"ada@example.com": 3, "bob@example.com": 9}
    for email, visits in calls.items():
        scored = invoke(platform, "churn/score", {"customer": {"email": email, "visits": visits}})
        assert scored.json() == {"probability": 1 / (1 + visits), "write": visits < 4}
    sql = "select version, input, output, latency_ms, cost from predictions order by started_at"
    found: list[dict[str, Any]] = []
    limit = time.monotonic() + 120
    while len(found) < len(calls):
        assert time.monotonic() < limit, f"no rows\n{platform.log_tails()}"
        time.sleep(0.5)
        done = platform.cli("log", "query", "churn/score", sql, "--json", check=False)
        found = json.loads(done.stdout)["rows"] if done.returncode == 0 else []
    first, _ = found
    assert json.loads(first["input"]) == {"customer": {"email": "[scrubbed]", "visits": 3}}
    assert json.loads(first["output"]) == {"probability": 0.25, "write": True}
    assert first["latency_ms"] > 0
    assert float(first["cost"]) > 0
    entries = json.loads(platform.cli("audit", "--action", "predictions.read", "--json").stdout)
    assert (entries[0]["subject"], entries[0]["after"]["rows"]) == ("main/churn/score", 2)
    replay_on_another_revision(platform, tmp_path)


def replay_on_another_revision(platform: PlatformUnderTest, directory: Path) -> None:
    """Replay both calls of the log on the revision that answered, and on one that answers
    otherwise and can be called by its name only."""
    skipped = platform.cli("replay", "churn/score", "--on", "stable", "--json", check=False)
    assert (skipped.returncode, json.loads(skipped.stdout)["skipped"]) == (1, 2)
    same = platform.cli("replay", "churn/score", "--on", "stable", "--scrubbed", "--json")
    assert json.loads(same.stdout)["equal"] == 2
    other = directory / "predictions.py"
    source = (EXAMPLES / "predictions.py").read_text()
    other.write_text(source.replace("1 / (1 + customer", "1 / (2 + customer"))
    platform.cli("deploy", str(other), "--no-traffic", "--no-wait")
    words = ("replay", "churn/score", "--on", "v2", "--scrubbed", "--fail-over", "0.5")
    done = platform.cli(*words, "--out", str(directory / "rows.jsonl"), "--json", check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["compared"], found["different"]) == (2, 2)
    counted = {one["path"]: one["rows"] for one in found["paths"]}
    assert counted == {"$.probability": 2, "$.write": 1}
    assert found["ms"]["exec"]["new"]["p50"] > 0
    rows = [json.loads(line) for line in (directory / "rows.jsonl").read_text().splitlines()]
    assert {row["result"] for row in rows} == {"different"}
    with platform.client() as client:
        assert client.traffic("churn", "score")["tags"] == {}


def test_reviews_are_rated_from_a_file(platform: PlatformUnderTest, tmp_path: Path) -> None:
    deploy(platform, "batch_file.py")
    file = tmp_path / "reviews.jsonl"
    file.write_text("\n".join(batch_file.requests()))
    made = platform.cli("batch", "create", str(file), "--endpoint", batch_file.ENDPOINT, "--json")
    batch = json.loads(made.stdout)["id"]
    paths = [tmp_path / "answers.jsonl", tmp_path / "errors.jsonl"]
    options = [f"--{name}={path}" for name, path in zip(("output", "errors"), paths, strict=True)]
    ended = platform.cli("batch", "wait", batch, *options, "--json", check=False)
    assert ended.returncode == 1, ended.stderr  # one review is empty
    assert json.loads(ended.stdout)["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    answers, errors = [
        [json.loads(line) for line in path.read_text().splitlines()] for path in paths
    ]
    ratings = {one["custom_id"]: one["response"]["body"] for one in answers}
    assert ratings == {"review-0": 2, "review-1": -1, "review-2": 1}
    assert [(one["custom_id"], one["response"]["status_code"]) for one in errors] == [
        ("review-3", 500)
    ]


def test_a_guard_ends_what_it_refuses(platform: PlatformUnderTest) -> None:
    deploy(platform, "guard.py")

    def ask(text: str, **more: Any) -> httpx.Response:
        body = {"model": "guarded/parrot", "messages": [{"role": "user", "content": text}], **more}
        url = f"{platform.url}/v1/chat/completions"
        return httpx.post(url, json=body, headers=platform.headers, timeout=120)

    limit = time.monotonic() + 120
    while ask("hello").status_code == 503:  # the function of the guard starts
        assert time.monotonic() < limit, platform.log_tails()
        time.sleep(0.5)
    assert ask("hello you").json()["choices"][0]["message"]["content"] == "hello you"
    refused = ask("my address is ada@example.com")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "content_filter")
    stream = ask("read me the card", stream=True).text
    assert "pleasure" in stream
    assert "4111" not in stream
    assert '"finish_reason":"content_filter"' in stream
    rude = ask("insult me").json()["choices"][0]
    assert (rude["finish_reason"], rude["message"]["content"]) == ("content_filter", "")
    limit = time.monotonic() + 60
    rules: set[str] = set()
    while rules != {"email", "credit_card", "rude"}:
        assert time.monotonic() < limit, f"{rules}\n{platform.log_tails()}"
        time.sleep(0.5)
        found = platform.cli("audit", "--action", "guard.refuse", "--json").stdout
        rules = {entry["after"]["rule"] for entry in json.loads(found)}


def test_equal_questions_are_answered_from_memory_until_a_rollout_or_a_rollback(
    platform: PlatformUnderTest, tmp_path: Path
) -> None:
    def located(address: str) -> tuple[str, str]:
        answer = invoke(platform, "geo/locate", {"address": address})
        return answer.headers["pilotlight-cache"], answer.headers["pilotlight-revision"]

    deploy(platform, "response_cache.py")
    first, second = located("10 Downing Street"), located("10 Downing Street")
    assert (first[0], second[0]) == ("miss", "hit")
    assert located("1600 Pennsylvania Avenue")[0] == "miss"
    changed = tmp_path / "response_cache.py"
    changed.write_text((EXAMPLES / "response_cache.py").read_text() + "\n# another version\n")
    platform.cli("deploy", str(changed))
    newer, again = located("10 Downing Street"), located("10 Downing Street")
    assert (newer[0], again[0]) == ("miss", "hit")
    assert newer[1] != first[1]
    platform.cli("app", "rollback", "geo/locate", "--yes")
    back, last = located("10 Downing Street"), located("10 Downing Street")
    assert (back, last[0]) == (("miss", first[1]), "hit")


def test_drift_from_the_training_data_is_shown(platform: PlatformUnderTest, tmp_path: Path) -> None:
    deploy(platform, "drift.py")
    rng, lines = random.Random(1), []
    for _ in range(500):
        given = {
            "age": rng.randint(18, 80),
            "income": rng.gauss(2_400, 500),
            "country": rng.choice(("DE", "FR")),
        }
        lines.append(json.dumps({"input": given, "output": {"probability": rng.random()}}))
    training = tmp_path / "training.jsonl"
    training.write_text("\n".join(lines))
    platform.cli("drift", "baseline", "loans/score", "--from", str(training))
    for _ in range(150):  # earn twice as much as those of the training data
        given = {
            "age": rng.randint(18, 80),
            "income": rng.gauss(4_800, 500),
            "country": rng.choice(("DE", "FR")),
        }
        invoke(platform, "loans/score", given)
    found: dict[str, Any] = {}
    limit = time.monotonic() + 120
    while not found or found["rows"] < 150:
        assert time.monotonic() < limit, f"{found}\n{platform.log_tails()}"
        time.sleep(0.5)
        shown = json.loads(platform.cli("drift", "show", "loans/score", "--json").stdout)
        found = shown["current"]
    by_name = {one["feature"]: one for one in found["features"]}
    assert found["status"] == "drift"
    assert by_name["$.income"]["status"] == "drift"
    assert by_name["$.income"]["ks"] > 0.9
    assert {by_name[name]["status"] for name in ("$.age", "$.country")} <= {"ok", "moderate"}
    assert "drift" in platform.cli("drift", "show", "loans/score").stdout


def test_features_come_from_redis_and_are_those_of_the_training(
    platform: PlatformUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features.train(tmp_path)
    monkeypatch.setenv("FRAUD_MODEL", str(tmp_path))
    with ReachableRedis(host_address()) as server:
        platform.cli("secret", "set", "features", "FEATURES_REDIS_URL", input=server.url)
        deploy(platform, "features.py")
        known = {"payments": 0, "mean_amount": 90.0, "updated_at": time.time()}
        server.client.set(features.holders.key_of(holder="ada:1"), json.dumps(known))
        ada = {"holder": "ada:1", "amount": 90.0}
        limit = time.monotonic() + 60
        while True:
            answer = invoke(platform, "fraud/Fraud.score", ada)
            if "pilotlight-degraded" not in answer.headers:
                break  # the first call may be faster than the connection
            assert time.monotonic() < limit, platform.log_tails()
        assert answer.json() == 0.5
        unknown = invoke(platform, "fraud/Fraud.score", {**ada, "holder": "eve"})
        assert unknown.headers["pilotlight-degraded"] == "features=missing"
        assert unknown.json() == pytest.approx(1 / (1 + math.exp(-2.5)))
    answer = invoke(platform, "fraud/Fraud.score", ada)
    assert answer.headers["pilotlight-degraded"] == "features=unavailable"
    assert answer.json() == pytest.approx(1 / (1 + math.exp(-2.5)))
    pilotlight.ModelCard(features="0" * 64).save(tmp_path / "model_card.json")
    refused = platform.cli("deploy", str(EXAMPLES / "features.py"), "--no-wait", check=False)
    assert refused.returncode != 0
    assert "its model was trained with 000000000000" in " ".join(refused.stderr.split())

"""A good release and a bad one, from end to end: `python examples/canary/play.py`.

Starts a platform of its own, sends it reviews to rate all the while, and releases version 2, which
is better, and version 3, which fails on every fifth review. Prints what the platform decided and
why, and draws it: `--picture FILE`. Takes about a minute; nothing stays."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from picture import Answer, Event, draw  # type: ignore[import-not-found]  # beside this file

from pilotlight import profile

HERE = Path(__file__).resolve().parent
REVIEWS = ("great, and fast", "never again", "not bad", "hardly good", "schön, und schnell")
STEPS, EVERY = "10,50,100", "6s"
QUICK_STEPS, QUICK_EVERY = "50,100", "2s"
GATES = (
    *("--min-samples", "20", "--gate", "error_ratio", "--gate", "latency_p99"),
    *("--gate", "cost_per_call+100%"),
)
"""The default gates, but for the cost: a call is billed by its CPU time, which changes by more than
the default's 20 % when the machine begins other work in the middle of the play."""
PER_S = 40.0
PATIENCE_S = 240.0
CALM_S = 4.0
FINISHED = ("done", "rolled_back", "halted", "aborted", "superseded")


class Platform:
    """A platform of this play's own, driven by its command line as a user would."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._config = directory / "platform.yaml"
        self._config.write_text(
            json.dumps({"platform": {"home": str(directory / "home")}, **self._quiet()})
        )
        self._environment = {
            # not the address and key of another platform, which a shell may export
            **{k: v for k, v in os.environ.items() if not k.startswith("PILOTLIGHT_")},
            "PILOTLIGHT_CONFIG": str(directory / "profile.toml"),
            "NO_COLOR": "1",
        }

    @staticmethod
    def _quiet() -> dict[str, dict[str, Any]]:
        sections: dict[str, dict[str, Any]] = {
            name: {"metrics_listen": None} for name in ("controller", "snapshotter", "weight_cache")
        }
        return {
            **sections,
            "activator": {"listen": f"127.0.0.1:{free_port()}", "metrics_listen": None},
        }

    def command(self, *arguments: str) -> Any:
        """`pilotlight … --json`, as a value; what it says on stderr is shown when it fails."""
        base = [sys.executable, "-m", "pilotlight", "--config", str(self._config), "--json"]
        run = subprocess.run(
            [*base, *arguments],
            env=self._environment,
            cwd=self._directory,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise SystemExit(f"pilotlight {' '.join(arguments)}: {run.stderr.strip()[-1500:]}")
        return json.loads(run.stdout) if run.stdout.strip() else None

    def client(self) -> httpx.Client:
        """HTTP with the administrator's key."""
        found = profile.load(
            {
                "PILOTLIGHT_CONFIG": str(self._directory / "profile.toml"),
                "HOME": str(self._directory),
            }
        )
        return httpx.Client(
            base_url=found.url, headers={"authorization": f"Bearer {found.api_key}"}, timeout=30
        )


class Callers:
    """Sends reviews at a steady pace, and keeps what became of each."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(4)
        ]
        self.answers: list[Answer] = []

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Beside what the block does."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    def _run(self, number: int) -> None:
        for text in itertools.cycle(REVIEWS[number:] + REVIEWS[:number]):
            if self._stop.wait(len(self._threads) / PER_S):
                return
            response = self._client.post("/v1/functions/reviews/rate:invoke", json={"text": text})
            revision = response.headers.get("pilotlight-revision", "")
            self.answers.append(
                Answer(at=time.time(), revision=revision, is_good=response.status_code == 200)
            )


def main() -> None:
    """Play it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, help="write an SVG of the play there")
    parser.add_argument("--quick", action="store_true", help="two short steps instead of three")
    arguments = parser.parse_args()
    steps, every = (QUICK_STEPS, QUICK_EVERY) if arguments.quick else (STEPS, EVERY)
    canary = ("--canary", steps, "--every", every, *GATES)
    with own_platform() as platform, platform.client() as client:
        events: list[Event] = []
        release(platform, events, "v1.py", "--eval", evaluation(0.71))
        # its first instance is up
        platform.command("call", "reviews/rate", "--arg", f"text={REVIEWS[0]}")
        callers = Callers(client)
        with callers.calling():
            time.sleep(CALM_S)
            release(platform, events, "v2.py", *canary, "--eval", evaluation(0.86))
            follow(client, events)
            time.sleep(CALM_S)
            release(platform, events, "v3.py", *canary, "--eval", evaluation(0.87))
            follow(client, events)
            time.sleep(CALM_S)
        summary(callers.answers)
        print("\nWhat is in the app's history now:")
        for entry in platform.command("app", "history", "reviews"):
            print(f"  version {entry['version']}: {entry['action']} {entry.get('message') or ''}")
        if arguments.picture is not None:
            arguments.picture.write_text(draw(callers.answers, events))
            print(f"\npicture: {arguments.picture}")


@contextlib.contextmanager
def own_platform() -> Iterator[Platform]:
    """Up, and gone afterwards, with everything it wrote."""
    directory = Path(tempfile.mkdtemp(prefix="plc"))
    directory.chmod(0o755)  # workers of other uids pass through it
    platform = Platform(directory)
    try:
        platform.command("up", "--detach")
        yield platform
    finally:
        with contextlib.suppress(SystemExit):
            platform.command("down")
        shutil.rmtree(directory, ignore_errors=True)


def free_port() -> int:
    """A TCP port that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def evaluation(accuracy: float) -> str:
    """A file with the numbers of an offline evaluation, as a training job would leave it."""
    file = Path(tempfile.gettempdir()) / f"metrics-{accuracy}.json"
    file.write_text(json.dumps({"accuracy": accuracy}))
    return str(file)


def release(platform: Platform, events: list[Event], file: str, *options: str) -> None:
    """Deploy one version, and say so."""
    made = platform.command("deploy", str(HERE / file), "--no-wait", *options)
    revision = made["functions"][0]["revision"]
    told(events, f"deploy {file} → {revision}")


def follow(client: httpx.Client, events: list[Event]) -> None:
    """Until the running rollout has ended, telling each step and its reasons. Raises SystemExit
    when it does not end."""
    deadline = time.monotonic() + PATIENCE_S
    before: tuple[str, int] | None = None
    cause = ""
    while time.monotonic() < deadline:
        newest = client.get("/v1/rollouts", params={"app": "reviews"}).json()["rollouts"][0]
        if (now := (newest["state"], newest["step"])) != before:
            before = now
            told(
                events,
                f"{newest['state']}: {newest['weight']} % on {newest['candidate']}",
                why=newest["reason"],
            )
        if newest["state"] in FINISHED:
            return
        decision = next(iter(client.get(f"/v1/rollouts/{newest['id']}").json()["decisions"]), None)
        if decision is not None and decision["cause"] != cause:
            cause = decision["cause"]
            print(f"          {decision['verdict']}: {decision['reasons'][0]}", flush=True)
        time.sleep(0.25)
    raise SystemExit(f"the rollout did not end within {PATIENCE_S:g} s")


def told(events: list[Event], text: str, why: str = "") -> None:
    """Print it, and keep it for the picture."""
    events.append(Event(at=time.time(), text=text))
    print(f"{time.strftime('%H:%M:%S')}  {text}{f'  ({why})' if why else ''}", flush=True)


def summary(answers: list[Answer]) -> None:
    """Who answered what."""
    print("\nWhat callers saw:")
    by_revision = Counter((answer.revision or "none", answer.is_good) for answer in answers)
    for revision in sorted({name for name, _ in by_revision}):
        good, bad = by_revision[revision, True], by_revision[revision, False]
        print(f"  {revision:<12} {good + bad:>6} calls, {bad} failed")


if __name__ == "__main__":
    main()

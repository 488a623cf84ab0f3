"""A whole platform in one process: a real HTTP server on loopback that speaks the public API and
runs deployed functions in its threads.

It keeps what the SDK and the command line send (blobs, images, apps, secrets, keys, calls), checks
digests and keys as the real one does, and answers with the same problem documents. Functions run by
the spec's module and name in this process, or from their pickle. `refuse(...)` lets the next
requests fail. It has no instances, no billing and no clocks of its own."""

from __future__ import annotations

import base64
import hashlib
import inspect
import io
import json
import pickle
import re
import subprocess
import tarfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote

from starlette.testclient import TestClient

from activator.async_calls.public_record import public_record
from pilotlight.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    PilotlightError,
    Unauthenticated,
    UnsupportedMediaType,
)
from pilotlight.profile import Profile
from pilotlight.protocol import (
    CONTENT_NDJSON,
    CONTENT_PICKLE,
    CONTENT_PROBLEM,
    CONTENT_SSE,
    HEADER_IDEMPOTENCY_KEY,
    HEADER_OUTCOME,
    HEADER_PRIORITY,
    HEADER_REQUEST_ID,
    HEADER_REVISION,
    HEADER_SERVER_TIMING,
    HEADER_START,
    HEADER_WEBHOOK,
    TENANT_PATH,
    CallRecord,
    new_call_id,
    problem,
)
from pilotlight.sdk.batches import local_body
from pilotlight.spec.bound import bind
from pilotlight.spec.function import FunctionKind, FunctionSpec, ImageSpec
from pilotlight.spec.record_json import from_json, to_json
from tests.fakes.loopback import LoopbackServer, handler_for
from tests.fakes.pushed_weights import PushedWeights
from tests.fakes.streamed_calls import stream_of
from tests.fakes.user_code import Answer, Asked, entered, run, running, web_application
from weight_cache.manifest import FileHash

API_KEY = "pl-fake-admin-key"
SHARING_TENANT = "acme"


@dataclass(kw_only=True)
class DeployedApp:
    """An app as it is now, and its changes, newest first."""

    functions: dict[str, FunctionSpec]
    history: list[dict[str, Any]]
    stopped: bool = False


Route = Callable[..., Answer]


class FakePlatform:
    """The server, and everything that was sent to it. A context manager; `lock` guards what handler
    threads change."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.weights = PushedWeights(self.blobs)
        self.images: dict[str, ImageSpec] = {}
        self.apps: dict[tuple[str, str], DeployedApp] = {}
        self.deleted: dict[tuple[str, str], DeployedApp] = {}
        self.leases: dict[tuple[str, str], float] = {}
        self.renewed = threading.Semaphore(0)
        self.secrets: dict[tuple[str, str], dict[str, str]] = {}
        self.keys: dict[str, dict[str, Any]] = {}
        self.environments = {"main"}
        self.calls: dict[str, CallRecord] = {}
        self.log_lines: list[dict[str, Any]] = []
        self.instances: list[dict[str, Any]] = []
        self.templates: list[dict[str, Any]] = []
        self.snapshots: list[dict[str, Any]] = []
        self.snapshots_off: set[tuple[str, str, str]] = set()
        self.warmup_report: dict[str, Any] = {}
        self.start_errors: dict[str, PilotlightError] = {}
        """Functions that do not start, with the error."""
        self.asked: list[str] = []
        self.priorities: list[str] = []
        self.lock = threading.Lock()
        self.followers = 0
        self.during_calls: Callable[[], None] = lambda: None
        self._written = threading.Condition()
        self._is_closing = False
        self._cut_offs = 0
        self._refusals: deque[Answer | None] = deque()
        self._cancelled: set[str] = set()
        self._callers: list[threading.Thread] = []
        self._server = LoopbackServer(("127.0.0.1", 0), handler_for(self.answer))
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, name="fake platform"
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def profile(self, *, api_key: str = API_KEY, environment: str = "main") -> Profile:
        """A profile that reaches it."""
        return Profile(url=self.url, api_key=api_key, environment=environment)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        with self._written:
            self._is_closing = True
            self._written.notify_all()
        for caller in self._callers:
            caller.join()
        self._server.server_close()

    def refuse(self, error: PilotlightError | None, *, times: int = 1) -> None:
        """Answer the next `times` requests with this error; None drops their connections
        instead."""
        self._refusals.extend([_problem(error) if error is not None else None] * times)

    def function(self, app: str, function: str, environment: str = "main") -> FunctionSpec:
        """The deployed spec."""
        return self.apps[environment, app].functions[function]

    # -- requests ----------------------------------------------------------------------------------
    def answer(self, asked: Asked) -> Answer | None:
        """The answer to one request; None drops the connection."""
        with self.lock:
            self.asked.append(f"{asked.method} {asked.path}")
            if self._refusals:
                return self._refusals.popleft()
        try:
            self._authenticate(asked)
            path = self._own_path(asked)
            for method, pattern, route in _ROUTES:
                if asked.method == method and (match := re.fullmatch(pattern, path)):
                    return route(self, asked, *(unquote(part or "") for part in match.groups()))
            raise NotFound(f"nothing is served at {asked.method} {asked.path}")
        except PilotlightError as e:
            return _problem(e)

    def _own_path(self, asked: Asked) -> str:
        """The path below another tenant's name. SHARING_TENANT has the functions that are deployed
        here, and no other tenant has any."""
        if HEADER_PRIORITY in asked.headers:
            self.priorities.append(asked.headers[HEADER_PRIORITY])
        match = re.fullmatch(rf"{TENANT_PATH}([^/]+)(/v1/functions/.*)", asked.path)
        if match is None:
            return asked.path
        if match[1] != SHARING_TENANT:
            raise NotFound(f"there is no function {match[2]}")
        if asked.headers.get("content-type") == CONTENT_PICKLE:
            raise UnsupportedMediaType("calls to another tenant's function must use JSON")
        return match[2]

    def _authenticate(self, asked: Asked) -> None:
        secret = asked.headers.get("authorization", "").removeprefix("Bearer ")
        if secret != API_KEY and secret not in {
            k["secret"] for k in self.keys.values() if k["revoked_at"] is None
        }:
            raise Unauthenticated("no valid API key was given")

    # -- blobs and images --------------------------------------------------------------------------
    def has_blob(self, asked: Asked, digest: str) -> Answer:
        return Answer(status=200 if digest in self.blobs else 404)

    def put_blob(self, asked: Asked, digest: str) -> Answer:
        whole = FileHash() if asked.query.get("chunked") == "true" else hashlib.sha256()
        whole.update(asked.body)
        if whole.hexdigest() != digest:
            raise InvalidInput(f"the body is not {digest}", actual=whole.hexdigest())
        created = digest not in self.blobs
        self.blobs[digest] = asked.body
        return _json(
            {"digest": digest, "size_bytes": len(asked.body), "created": created},
            201 if created else 200,
        )

    def get_blob(self, asked: Asked, digest: str) -> Answer:
        return self.weights.get_blob(asked, digest)

    def weights_named(self, asked: Asked, name: str, verb: str = "") -> Answer:
        routes = {"GET": self.weights.show, "PUT": self.weights.put, "DELETE": self.weights.delete}
        verbs = {
            "verify": self.weights.verify,
            "prefetch": self.weights.prefetch,
            "pin": self.weights.pin,
            "unpin": self.weights.unpin,
        }
        return (verbs[verb] if verb else routes[asked.method])(asked, name)

    def list_weights(self, asked: Asked) -> Answer:
        return self.weights.listing(asked)

    def build_image(self, asked: Asked) -> Answer:
        spec = from_json(ImageSpec, asked.json())
        lines = [{"step": i, "text": str(step["op"])} for i, step in enumerate(spec.steps)]
        if any("no-such-package" in step.get("packages", []) for step in spec.steps):
            failed = problem(
                type="invalid-input",
                title="Build failed",
                status=400,
                detail="pip install no-such-package failed",
            )
            return _ndjson([*lines, {"error": failed}])
        self.images[spec.digest()] = spec
        return _ndjson([*lines, {"image": spec.digest()}])

    def show_container_image(self, asked: Asked, app: str, digest: str) -> Answer:
        return _json({"repository": None, "reference": None})

    # -- apps --------------------------------------------------------------------------------------
    def deploy(self, asked: Asked, name: str) -> Answer:
        body = asked.json()
        specs = [from_json(FunctionSpec, f) for f in body["functions"]]
        for spec in specs:
            self._check(asked.environment, spec)
        before = self.apps.get((asked.environment, name)) or DeployedApp(functions={}, history=[])
        self.leases.pop((asked.environment, name), None)
        if body.get("lease_s") is not None:
            self.leases[asked.environment, name] = body["lease_s"]
        version = len(before.history) + 1
        made = [
            {
                "function": s.name,
                "revision": f"v{version}-{s.digest()[:6]}",
                "created": before.functions.get(s.name) != s,
            }
            for s in specs
        ]
        entry = {
            "version": version,
            "action": "deploy",
            "message": body["message"],
            "labels": body["labels"],
            "functions": made,
        }
        entry |= {"created_at": 1_700_000_000.0 + version, "created_by": "k-fake"}
        self.apps[asked.environment, name] = DeployedApp(
            functions={s.name: s for s in specs}, history=[entry, *before.history]
        )
        return _json(
            {"app": name, "environment": asked.environment, "version": version, "functions": made}
        )

    def _check(self, environment: str, spec: FunctionSpec) -> None:
        for digest in (spec.bundle, *(w.manifest for w in spec.weights)):
            if digest not in self.blobs:
                raise InvalidInput(f"function {spec.name!r}: {digest} was not uploaded")
        if spec.image is not None and spec.image not in self.images:
            raise InvalidInput(f"function {spec.name!r}: image {spec.image} was not built")
        for secret in spec.secrets:
            if (environment, secret) not in self.secrets:
                raise InvalidInput(f"function {spec.name!r}: there is no secret {secret!r}")

    def list_apps(self, asked: Asked) -> Answer:
        return _json(
            {
                "apps": [
                    self._summary(e, name)
                    for e, name in sorted(self.apps)
                    if e == asked.environment
                ]
            }
        )

    def _summary(self, environment: str, name: str) -> dict[str, Any]:
        app = self.apps[environment, name]
        times = {
            "created_at": app.history[-1]["created_at"],
            "updated_at": app.history[0]["created_at"],
        }
        return {
            "name": name,
            "version": len(app.history),
            "stopped": app.stopped,
            "expires_at": None,
            "functions": len(app.functions),
            **times,
        }

    def show_app(self, asked: Asked, name: str) -> Answer:
        app = self._app(asked, name)
        functions = [
            {
                "id": f"f-{s.digest()[:16]}",
                "name": s.name,
                "created_at": 0.0,
                "traffic": [],
                "spec": to_json(s),
            }
            | {"snapshots": (asked.environment, name, s.name) not in self.snapshots_off}
            for s in app.functions.values()
        ]
        return _json(
            {
                **self._summary(asked.environment, name),
                "environment": asked.environment,
                "functions": functions,
            }
        )

    def history(self, asked: Asked, name: str) -> Answer:
        return _json({"history": self._app(asked, name).history})

    def stop_app(self, asked: Asked, name: str) -> Answer:
        app = self._app(asked, name)
        app.stopped = True
        return _json({"app": name, "version": len(app.history)})

    def renew_app(self, asked: Asked, name: str) -> Answer:
        self._app(asked, name)
        if (asked.environment, name) not in self.leases:
            raise Conflict(f"app {name!r} has no lease to renew")
        self.renewed.release()
        return _json({"app": name, "expires_at": 1_700_000_000.0})

    def delete_app(self, asked: Asked, name: str) -> Answer:
        self.deleted[asked.environment, name] = self._app(asked, name)
        del self.apps[asked.environment, name]
        self.leases.pop((asked.environment, name), None)
        return Answer(status=204)

    def _app(self, asked: Asked, name: str) -> DeployedApp:
        if (asked.environment, name) not in self.apps:
            raise NotFound(f"there is no app {name!r} in environment {asked.environment!r}")
        return self.apps[asked.environment, name]

    # -- calls -------------------------------------------------------------------------------------
    def invoke(self, asked: Asked, app: str, dotted: str) -> Answer:
        call, spec = self._callable(asked, app, dotted)
        call_id = asked.headers.get(HEADER_REQUEST_ID) or new_call_id()
        self.during_calls()
        with running(call_id):
            answer = run(call, asked)
        timing = {
            HEADER_START: "WARM",
            HEADER_SERVER_TIMING: "queue;dur=0, start;dur=0, exec;dur=1",
            "pilotlight-cost": "0.000001",
        }
        answer.headers |= {
            HEADER_REQUEST_ID: call_id,
            HEADER_REVISION: f"v1-{spec.digest()[:6]}",
            **timing,
        }
        return answer

    def _callable(
        self, asked: Asked, app: str, dotted: str
    ) -> tuple[Callable[..., Any], FunctionSpec]:
        function, _, method = dotted.partition(".")
        spec = self._app(asked, app).functions.get(function)
        if spec is None or spec.method(method) is None:
            raise NotFound(f"there is no function {app}/{dotted}")
        raw = self._raw(spec)
        call = getattr(entered(raw, spec.arguments), method) if method else raw
        return local_body(call, getattr(raw, method) if method else raw), spec

    def _raw(self, spec: FunctionSpec) -> Any:
        if spec.pickled is None:
            found = import_module(spec.module)
            for part in spec.qualname.split("."):
                found = found.__pilotlight__.raw if hasattr(found, "__pilotlight__") else found
                if inspect.isclass(found) and spec.kind is FunctionKind.ASGI:
                    break  # the class, of which the name is that of a web application
                found = getattr(found, part)
        else:
            with tarfile.open(fileobj=io.BytesIO(self.blobs[spec.bundle])) as tar:
                member = tar.extractfile(spec.pickled)
                assert member is not None
                found = pickle.loads(member.read())
        return found.__pilotlight__.raw if hasattr(found, "__pilotlight__") else found

    def bind(self, asked: Asked, app: str, function: str) -> Answer:
        functions = self._app(asked, app).functions
        if function not in functions:
            raise NotFound(f"there is no function {app}/{function}")
        spec = bind(functions[function], asked.json()["arguments"], asked.json()["options"])
        functions[spec.name] = spec
        return _json({"function": spec.name})

    def web(self, asked: Asked, app: str, function: str, path: str) -> Answer:
        """The web application, without its lifespan. A request at a time."""
        spec = self._app(asked, app).functions.get(function)
        if spec is None or spec.kind is not FunctionKind.ASGI:
            raise NotFound(f"nothing is served at {asked.path}")
        root = f"/fn/{app}/{function}"
        client = TestClient(web_application(self._raw(spec), spec), root_path=root)
        answer = client.request(
            asked.method,
            path or "/",
            params=dict(asked.query),
            content=asked.body,
            headers={k: v for k, v in asked.headers.items() if k == "content-type"},
        )
        kind = answer.headers.get("content-type", "")
        return Answer(status=answer.status_code, content_type=kind, body=answer.content)

    def submit(self, asked: Asked, app: str, dotted: str) -> Answer:
        call, spec = self._callable(asked, app, dotted)
        call_id = new_call_id()
        function, _, method = dotted.partition(".")
        self.calls[call_id] = CallRecord(
            id=call_id,
            tenant="t-fake",
            environment=asked.environment,
            app=app,
            function=function,
            method=method,
            state="RUNNING",
            sequence=1,
            submitted_at=0.0,
            revision=f"v1-{spec.digest()[:6]}",
            attempt=1,
            webhook=asked.headers.get(HEADER_WEBHOOK, ""),
            labels={"idempotency_key": asked.headers.get(HEADER_IDEMPOTENCY_KEY, "")},
        )

        def finish() -> None:
            with running(call_id):
                answer = run(call, asked)
            with self.lock:
                if call_id not in self._cancelled:
                    self.calls[call_id] = _finished(self.calls[call_id], answer)

        caller = threading.Thread(target=finish, name=f"fake call {call_id}")
        self._callers.append(caller)
        caller.start()
        return _json({"id": call_id, "state": "QUEUED"}, 202)

    def show_call(self, asked: Asked, call_id: str) -> Answer:
        if call_id not in self.calls:
            raise NotFound(f"there is no call {call_id}")
        if "wait_s" in asked.query and self._callers:
            self._callers[-1].join(min(0.2, float(asked.query["wait_s"])))
        return Answer(body=public_record(self.calls[call_id].to_json()))

    def stream_call(self, asked: Asked, call_id: str) -> Answer:
        """All of it, once it has ended."""
        for caller in list(self._callers):
            caller.join()
        return Answer(
            content_type=CONTENT_SSE,
            body=stream_of(self.calls[call_id], asked.headers.get("last-event-id", "")),
        )

    def cancel_call(self, asked: Asked, call_id: str) -> Answer:
        with self.lock:
            self._cancelled.add(call_id)
            record = {
                **self.calls[call_id].to_json(),
                "state": "CANCELLED",
                "sequence": 2,
                "outcome": "cancelled",
            }
            self.calls[call_id] = CallRecord.from_json(record)
        return _json({"id": call_id, "state": "CANCELLED"})

    def warmup(self, asked: Asked, app: str, dotted: str) -> Answer:
        if dotted.partition(".")[0] not in self._app(asked, app).functions:
            raise NotFound(f"there is no function {app}/{dotted}")
        if error := self.start_errors.get(dotted):
            raise error
        if CONTENT_NDJSON in asked.headers.get("accept", ""):
            stages = [
                {"stage": stage, "elapsed_ms": n}
                for n, stage in enumerate(("template", "instance", "snapshot"))
            ]
            return _ndjson([*stages, {"report": self.warmup_report}])
        return _json(self.warmup_report)

    # -- Templates and snapshots -------------------------------------------------------------------
    def list_templates(self, asked: Asked) -> Answer:
        return _json({"templates": self.templates})

    def drop_template(self, asked: Asked, revision: str) -> Answer:
        if revision not in {t["revision"] for t in self.templates}:
            raise NotFound(f"there is no Template of {revision}")
        self.templates = [t for t in self.templates if t["revision"] != revision]
        return Answer(status=204)

    def list_snapshots(self, asked: Asked) -> Answer:
        wanted = {key: asked.query[key] for key in ("app", "function") if key in asked.query}
        return _json(
            {"snapshots": [s for s in self.snapshots if wanted.items() <= s["labels"].items()]}
        )

    def show_snapshot(self, asked: Asked, snapshot: str) -> Answer:
        return _json(self._snapshot(snapshot))

    def prove_snapshot(self, asked: Asked, snapshot: str) -> Answer:
        found = self._snapshot(snapshot)
        if "corrupt" not in found["reason"]:
            found |= {"state": "READY", "reason": ""}
        return _json(found)

    def quarantine_snapshot(self, asked: Asked, snapshot: str) -> Answer:
        reason = f"by a key: {asked.json()['reason']}"
        return _json(self._snapshot(snapshot) | {"state": "QUARANTINED", "reason": reason})

    def _snapshot(self, snapshot: str) -> dict[str, Any]:
        for found in self.snapshots:
            if found["id"] == snapshot:
                return found
        raise NotFound(f"there is no snapshot {snapshot}")

    def delete_snapshot(self, asked: Asked, snapshot: str) -> Answer:
        self.snapshots.remove(self._snapshot(snapshot))
        return _json({"deleted": 1})

    def delete_snapshots(self, asked: Asked, app: str, function: str) -> Answer:
        return _json({"deleted": self._delete_of(asked, app, function)})

    def switch_snapshots(self, asked: Asked, app: str, function: str) -> Answer:
        enabled, switch = asked.json()["enabled"], (asked.environment, app, function)
        deleted = 0 if enabled else self._delete_of(asked, app, function)
        (self.snapshots_off.discard if enabled else self.snapshots_off.add)(switch)
        return _json({"app": app, "function": function, "enabled": enabled, "deleted": deleted})

    def _delete_of(self, asked: Asked, app: str, function: str) -> int:
        if function not in self._app(asked, app).functions:
            raise NotFound(f"there is no function {app}/{function}")
        gone = [
            s
            for s in self.snapshots
            if (s["labels"]["app"], s["labels"]["function"]) == (app, function)
        ]
        self.snapshots = [s for s in self.snapshots if s not in gone]
        return len(gone)

    # -- the rest ----------------------------------------------------------------------------------
    def logs(self, asked: Asked) -> Answer:
        app = asked.query.get("app", "")
        if app and (asked.environment, app) not in self.apps | self.deleted:
            raise NotFound(f"there is no app {app!r} in environment {asked.environment!r}")
        since = float(asked.query.get("since", 0))
        if asked.query.get("follow") == "true":
            return _ndjson(self._followed(since))
        wanted = {key: asked.query[key] for key in ("instance", "call") if key in asked.query}
        lines = [
            line
            for line in self.log_lines
            if all(line.get(k) == v for k, v in wanted.items()) and line.get("time", 0.0) >= since
        ]
        return _ndjson(lines[-int(asked.query["tail"]) :] if "tail" in asked.query else lines)

    def write_log(self, text: str, *, stream: str = "stdout", instance: str = "i-fake") -> None:
        """A line that an instance prints; followers get it at once."""
        with self._written:
            number = len(self.log_lines)
            line = {"time": float(number), "instance": instance, "stream": stream, "text": text}
            self.log_lines.append(line)
            self._written.notify_all()

    def end_followers(self) -> None:
        """End the responses of all followers, as a proxy does that sees none of their lines."""
        with self._written:
            self._cut_offs += 1
            self._written.notify_all()

    def _followed(self, since: float) -> Iterator[dict[str, Any]]:
        self.followers += 1
        cut_offs = self._cut_offs
        number = 0
        while True:
            with self._written:
                while number == len(self.log_lines) and not self._is_over(cut_offs):
                    self._written.wait()
                if self._is_over(cut_offs):
                    return
                lines = self.log_lines[number:]
            yield from (line for line in lines if line["time"] >= since)
            number += len(lines)

    def _is_over(self, cut_offs: int) -> bool:
        return self._is_closing or self._cut_offs > cut_offs

    def list_instances(self, asked: Asked) -> Answer:
        return _json({"instances": self.instances})

    def stop_instance(self, asked: Asked, instance: str) -> Answer:
        if instance not in {i["id"] for i in self.instances}:
            raise NotFound(f"there is no instance {instance}")
        self.instances = [i for i in self.instances if i["id"] != instance]
        return Answer(status=204)

    def exec_instance(self, asked: Asked, instance: str) -> Answer:
        """Run the command on this machine."""
        done = subprocess.run(asked.json()["argv"], capture_output=True, text=True, check=False)
        return _ndjson(
            [
                {"stream": "stdout", "text": done.stdout},
                {"stream": "stderr", "text": done.stderr},
                {"exit_status": done.returncode},
            ]
        )

    def list_secrets(self, asked: Asked) -> Answer:
        return _json(
            {
                "secrets": [
                    self._secret(name) for e, name in sorted(self.secrets) if e == asked.environment
                ]
            }
        )

    def put_secret(self, asked: Asked, name: str) -> Answer:
        self.secrets[asked.environment, name] = dict(asked.json()["values"])
        return _json(self._secret(name, asked.environment))

    def _secret(self, name: str, environment: str = "main") -> dict[str, Any]:
        return {
            "name": name,
            "variables": sorted(self.secrets[environment, name]),
            "created_at": 0.0,
            "updated_at": 0.0,
        }

    def delete_secret(self, asked: Asked, name: str) -> Answer:
        if self.secrets.pop((asked.environment, name), None) is None:
            raise NotFound(f"there is no secret {name!r}")
        return Answer(status=204)

    def list_keys(self, asked: Asked) -> Answer:
        return _json(
            {
                "keys": [
                    {k: v for k, v in key.items() if k != "secret"} for key in self.keys.values()
                ]
            }
        )

    def create_key(self, asked: Asked) -> Answer:
        body, number = asked.json(), len(self.keys) + 1
        key = {
            "id": f"k-{number:012x}",
            "secret": f"pl-fake-{number}",
            "scope": body["scope"],
            "name": body["name"],
        }
        key |= {
            "environment": body.get("environment"),
            "created_by": "k-fake",
            "created_at": 0.0,
            "revoked_at": None,
        }
        key["expires_at"] = body.get("expires_in_s")
        self.keys[key["id"]] = key
        return _json(key, 201)

    def revoke_key(self, asked: Asked, key: str) -> Answer:
        if key not in self.keys:
            raise NotFound(f"there is no API key {key}")
        self.keys[key]["revoked_at"] = 1.0
        return Answer(status=204)

    def list_environments(self, asked: Asked) -> Answer:
        return _json(
            {
                "environments": [
                    {"name": name, "created_at": 0.0} for name in sorted(self.environments)
                ]
            }
        )

    def create_environment(self, asked: Asked) -> Answer:
        name = asked.json()["name"]
        if name in self.environments:
            raise Conflict(f"environment {name!r} is there already")
        self.environments.add(name)
        return _json({"name": name, "created_at": 0.0}, 201)

    def delete_environment(self, asked: Asked, name: str) -> Answer:
        if name not in self.environments:
            raise NotFound(f"there is no environment {name!r}")
        self.environments.remove(name)
        return Answer(status=204)

    def whoami(self, asked: Asked) -> Answer:
        return _json({"tenant": {"id": "t-fake", "name": "acme"}, "key": "k-fake"})

    def billing(self, asked: Asked) -> Answer:
        whole = {
            "by": asked.query.get("by", "function"),
            "since": None,
            "until": None,
            "environment": asked.environment,
        }
        return _json({**whole, "rows": [], "totals": {}})


_ROUTES: list[tuple[str, str, Route]] = [
    ("HEAD", r"/v1/blobs/([0-9a-f]{64})", FakePlatform.has_blob),
    ("PUT", r"/v1/blobs/([0-9a-f]{64})", FakePlatform.put_blob),
    ("GET", r"/v1/blobs/([0-9a-f]{64})", FakePlatform.get_blob),
    ("GET", r"/v1/weights", FakePlatform.list_weights),
    *(
        (method, r"/v1/weights/([^/:]+)", FakePlatform.weights_named)
        for method in ("GET", "PUT", "DELETE")
    ),
    ("POST", r"/v1/weights/([^/:]+)/(verify|prefetch|pin|unpin)", FakePlatform.weights_named),
    ("POST", r"/v1/images", FakePlatform.build_image),
    ("GET", r"/v1/apps/([^/:]+)/images/([0-9a-f]{64})", FakePlatform.show_container_image),
    ("POST", r"/v1/apps/([^/:]+)/deploy", FakePlatform.deploy),
    ("GET", r"/v1/apps", FakePlatform.list_apps),
    ("GET", r"/v1/apps/([^/:]+)", FakePlatform.show_app),
    ("GET", r"/v1/apps/([^/:]+)/history", FakePlatform.history),
    ("POST", r"/v1/apps/([^/:]+):stop", FakePlatform.stop_app),
    ("POST", r"/v1/apps/([^/:]+):renew", FakePlatform.renew_app),
    ("DELETE", r"/v1/apps/([^/:]+)", FakePlatform.delete_app),
    ("POST", r"/v1/functions/([^/]+)/([^/:]+):invoke", FakePlatform.invoke),
    ("POST", r"/v1/functions/([^/]+)/([^/:]+):submit", FakePlatform.submit),
    ("POST", r"/v1/functions/([^/]+)/([^/:]+):warmup", FakePlatform.warmup),
    ("POST", r"/v1/functions/([^/]+)/([^/:]+):bind", FakePlatform.bind),
    *(
        (method, r"/fn/([^/]+)/([^/]+)(/.*)?", FakePlatform.web)
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE")
    ),
    ("GET", r"/v1/calls/([^/:]+)", FakePlatform.show_call),
    ("GET", r"/v1/calls/([^/:]+)/stream", FakePlatform.stream_call),
    ("POST", r"/v1/calls/([^/:]+):cancel", FakePlatform.cancel_call),
    ("GET", r"/v1/logs", FakePlatform.logs),
    ("GET", r"/v1/instances", FakePlatform.list_instances),
    ("POST", r"/v1/instances/([^/:]+):stop", FakePlatform.stop_instance),
    ("POST", r"/v1/instances/([^/:]+):exec", FakePlatform.exec_instance),
    ("GET", r"/v1/templates", FakePlatform.list_templates),
    ("DELETE", r"/v1/templates/([^/:]+)", FakePlatform.drop_template),
    ("GET", r"/v1/snapshots", FakePlatform.list_snapshots),
    ("GET", r"/v1/snapshots/([^/:]+)", FakePlatform.show_snapshot),
    ("POST", r"/v1/snapshots/([^/:]+):prove", FakePlatform.prove_snapshot),
    ("POST", r"/v1/snapshots/([^/:]+):quarantine", FakePlatform.quarantine_snapshot),
    ("DELETE", r"/v1/snapshots/([^/:]+)", FakePlatform.delete_snapshot),
    ("DELETE", r"/v1/functions/([^/]+)/([^/:]+)/snapshots", FakePlatform.delete_snapshots),
    ("PUT", r"/v1/functions/([^/]+)/([^/:]+)/snapshots", FakePlatform.switch_snapshots),
    ("GET", r"/v1/secrets", FakePlatform.list_secrets),
    ("PUT", r"/v1/secrets/([^/:]+)", FakePlatform.put_secret),
    ("DELETE", r"/v1/secrets/([^/:]+)", FakePlatform.delete_secret),
    ("GET", r"/v1/whoami", FakePlatform.whoami),
    ("GET", r"/v1/keys", FakePlatform.list_keys),
    ("POST", r"/v1/keys", FakePlatform.create_key),
    ("DELETE", r"/v1/keys/([^/:]+)", FakePlatform.revoke_key),
    ("GET", r"/v1/environments", FakePlatform.list_environments),
    ("POST", r"/v1/environments", FakePlatform.create_environment),
    ("DELETE", r"/v1/environments/([^/:]+)", FakePlatform.delete_environment),
    ("GET", r"/v1/billing/report", FakePlatform.billing),
]


def _finished(record: CallRecord, answer: Answer) -> CallRecord:
    body = b"".join(answer.stream) if answer.stream is not None else answer.body
    outcome = answer.headers[HEADER_OUTCOME]
    done = {
        "state": "SUCCEEDED" if outcome == "ok" else "FAILED",
        "sequence": 2,
        "finished_at": 1.0,
        "outcome": outcome,
    }
    result = {
        "status": answer.status,
        "content_type": answer.content_type,
        "result": base64.b64encode(body).decode(),
    }
    return CallRecord.from_json({**record.to_json(), **done, **result})


def _json(value: Any, status: int = 200) -> Answer:
    return Answer(status=status, body=json.dumps(value).encode())


def _ndjson(lines: Iterable[dict[str, Any]]) -> Answer:
    return Answer(
        content_type=CONTENT_NDJSON, stream=(json.dumps(line).encode() + b"\n" for line in lines)
    )


def _problem(error: PilotlightError) -> Answer:
    body = problem(
        type=error.type,
        title=type(error).__name__,
        status=error.status,
        detail=str(error),
        extra=dict(error.detail),
    )
    headers = {} if error.retry_after_s is None else {"retry-after": f"{error.retry_after_s:g}"}
    return Answer(
        status=error.status,
        content_type=CONTENT_PROBLEM,
        body=json.dumps(body).encode(),
        headers=headers,
    )

"""One request from beginning to end: rights, faults, the verb, the log."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import yaml

from tests.fakes.kubernetes import discovery
from tests.fakes.kubernetes.deleting import Deleter
from tests.fakes.kubernetes.faults import ADMIN, Fault, Faults, Rights
from tests.fakes.kubernetes.http import Answer, Request, Reset
from tests.fakes.kubernetes.kinds import Resource
from tests.fakes.kubernetes.logs import Logs
from tests.fakes.kubernetes.problems import Refused, qualified
from tests.fakes.kubernetes.rbac import Attributes
from tests.fakes.kubernetes.reading import Reader
from tests.fakes.kubernetes.requests import Asked, RequestLog
from tests.fakes.kubernetes.routing import Route, authorized_as, route
from tests.fakes.kubernetes.store import Store
from tests.fakes.kubernetes.subresources import Subresources
from tests.fakes.kubernetes.writing import APPLY, Hook, Options, Review, Writer

Json = dict[str, Any]
Outcome = tuple[int, bytes | Json] | Answer
_SPECIAL = ("log", "scale", "binding", "eviction", "finalize", "token")


@dataclass(kw_only=True)
class Asking:
    """One request, understood: `found` None = it means no resource."""

    request: Request
    parts: list[str]
    query: Mapping[str, str]
    found: Route | None
    verb: str
    options: Options

    @property
    def media(self) -> str:
        """Its content type, bare."""
        return _media(self.request)


class Handling:
    """Answers requests. Owner: the server's event loop. `resources()`: what is served just now."""

    def __init__(
        self,
        *,
        store: Store,
        reader: Reader,
        writer: Writer,
        deleter: Deleter,
        faults: Faults,
        rights: Rights,
        requests: RequestLog,
        logs: Logs,
        resources: Callable[[], Mapping[tuple[str, str, str], Resource]],
        on_delete: Hook,
    ) -> None:
        self._store = store
        self._reader = reader
        self._writer = writer
        self._deleter = deleter
        self._subresources = Subresources(store, reader, writer, deleter)
        self._faults = faults
        self._rights = rights
        self._requests = requests
        self._logs = logs
        self._resources = resources
        self._on_delete = on_delete

    def answer(self, request: Request) -> Answer | Awaitable[Answer]:
        """The answer, or what will become one."""
        split = urlsplit(request.target)
        query = dict(parse_qsl(split.query, keep_blank_values=True))
        parts = [unquote(part) for part in split.path.split("/") if part]
        try:
            found = self._route(parts)
            verb = (
                self._verb(found, request, query) if found is not None else request.method.lower()
            )
        except Refused as e:
            self._note(request, request.method.lower(), None, e.status, wrote=False)
            return _refusal(e)
        asking = Asking(
            request=request,
            parts=parts,
            query=query,
            found=found,
            verb=verb,
            options=self._options(query, request),
        )
        shown = found.resource.qualified if found is not None else ""
        fault = self._faults.take(verb, shown, request.target)
        if fault is not None:
            return self._faulty(fault, asking)
        return self._answer(asking)

    def _route(self, parts: list[str]) -> Route | None:
        if parts and (
            (parts[0] == "api" and len(parts) > 2) or (parts[0] == "apis" and len(parts) > 3)
        ):
            return route(parts, self._resources())
        return None

    def _verb(self, found: Route, request: Request, query: Mapping[str, str]) -> str:
        is_watch = query.get("watch") in ("true", "True", "1")
        return found.verb(request.method, is_watch=is_watch, is_apply=_media(request) == APPLY)

    async def _faulty(self, fault: Fault, asking: Asking) -> Answer:
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.after:
            done = self._answer(asking)
            if not isinstance(done, Answer):
                await done
        elif fault.status or fault.hang or fault.reset:
            self._note(asking.request, asking.verb, asking.found, fault.status, wrote=False)
        if fault.hang:
            await asyncio.Event().wait()
        if fault.reset:
            raise Reset
        if fault.status:
            text = fault.message or f"the server is asked to fail: {fault.status}"
            return _refusal(Refused(fault.status, text, retry_after_s=fault.retry_after_s))
        done = self._answer(asking)
        return done if isinstance(done, Answer) else await done

    def _answer(self, asking: Asking) -> Answer | Awaitable[Answer]:
        before = self._store.version
        try:
            outcome = (
                self._special(asking.parts)
                if asking.found is None
                else self._do(asking, asking.found)
            )
        except Refused as e:
            return self._done(asking, _refusal(e, asking.options), wrote=False)
        if not isinstance(outcome, Answer | tuple):
            return self._later(asking, outcome)
        answer = outcome if isinstance(outcome, Answer) else _document(*outcome, asking.options)
        return self._done(asking, answer, wrote=self._store.version != before)

    async def _later(self, asking: Asking, coming: Awaitable[Answer]) -> Answer:
        try:
            answer = await coming
        except Refused as e:
            answer = _refusal(e)
        return self._done(asking, answer, wrote=False)

    def _done(self, asking: Asking, answer: Answer, *, wrote: bool) -> Answer:
        self._note(asking.request, asking.verb, asking.found, answer.status, wrote=wrote)
        return answer

    def _special(self, parts: list[str]) -> Outcome:
        if parts == ["version"]:
            return 200, discovery.VERSION
        if parts and parts[0] in ("readyz", "livez", "healthz"):
            return Answer(body=b"ok", content_type="text/plain")
        found = discovery.answer(parts, self._resources().values()) if parts else None
        if found is None:
            raise Refused(404, "404 page not found")
        return 200, found

    def _do(self, asking: Asking, found: Route) -> Outcome | Awaitable[Answer]:
        verb, options, query = asking.verb, asking.options, asking.query
        self._authorize(found, verb, options.user)
        resource, namespace = found.resource, found.namespace or ""
        if found.subresource in _SPECIAL:
            return self._subresource(asking, found)
        if found.subresource and not (
            (found.subresource == "status" and resource.has_status)
            or (found.subresource == "resize" and resource.key == ("", "pods"))
        ):
            raise Refused(404, "404 page not found")
        if resource.create_only:
            return self._review(resource, _body(asking.request), options.user)
        if verb == "get":
            return 200, self._reader.get(resource, namespace, found.name).data
        if verb == "list":
            return 200, self._reader.list(resource, found.namespace, query)
        if verb == "watch":
            return self._watch(found, query)
        if verb == "create":
            body = _object(asking.request)
            if resource.key == ("", "pods"):
                self._require_account(namespace, body)
            return 201, self._writer.create(resource, namespace, body, options).data
        if verb == "update":
            return 200, self._writer.replace(found.target, _object(asking.request), options).data
        return (
            self._patch(asking, found)
            if verb in ("patch", "apply")
            else self._delete(asking, found)
        )

    def _require_account(self, namespace: str, pod: Json) -> None:
        """Refuse a pod whose service account is not there (admission plugin ServiceAccount)."""
        account = pod.get("spec", {}).get("serviceAccountName") or "default"
        if self._store.get(("", "serviceaccounts"), (namespace, account)) is None:
            name = pod["metadata"].get("name", "")
            text = (
                f'pods "{name}" is forbidden: error looking up service account '
                f'{namespace}/{account}: serviceaccount "{account}" not found'
            )
            raise Refused(403, text, details={"name": name, "kind": "pods"})

    def _options(self, query: Mapping[str, str], request: Request) -> Options:
        return replace(
            _options(query, request),
            user=self._rights.user_of(request.headers.get("authorization", "")),
        )

    def _authorize(self, found: Route, verb: str, user: str) -> None:
        """An apply that would create needs the right to create, too (as the API server asks for
        it)."""
        is_new = (
            verb == "apply"
            and self._store.get(found.resource.key, (found.namespace or "", found.name)) is None
        )
        for right in (authorized_as(verb), *(["create"] if is_new and user != ADMIN else [])):
            self._demand(found, right, user)

    def _demand(self, found: Route, right: str, user: str) -> None:
        resource = found.resource
        shown = f"{resource.plural}/{found.subresource}" if found.subresource else resource.plural
        name = found.name if right != "create" else ""
        asked = Attributes(
            user=user,
            verb=right,
            group=resource.group,
            resource=shown,
            namespace=found.namespace or "",
            name=name,
        )
        # anybody may ask for itself
        if (resource.create_only and user != ADMIN) or self._rights.is_allowed(asked):
            return
        where = (
            f'in the namespace "{found.namespace}"' if found.namespace else "at the cluster scope"
        )
        full = f"{qualified(resource.plural, resource.group)}" + (
            f' "{found.name}"' if found.name else ""
        )
        text = (
            f'{full} is forbidden: User "{user}" cannot {right} resource "{shown}" in API '
            f'group "{resource.group}" {where}'
        )
        details = {"name": found.name, "group": resource.group, "kind": resource.plural}
        raise Refused(403, text, details={key: value for key, value in details.items() if value})

    def _review(self, resource: Resource, body: Json, user: str) -> Outcome:
        wanted = body.get("spec", {}).get("resourceAttributes") or {}
        name = "/".join(
            part for part in (wanted.get("resource", ""), wanted.get("subresource", "")) if part
        )
        keys = ("verb", "group", "namespace", "name")
        allowed = self._rights.is_allowed(
            Attributes(user=user, resource=name, **{key: wanted.get(key, "") for key in keys})
        )
        return 201, self._subresources.review(resource, body, allowed)

    def _watch(self, found: Route, query: Mapping[str, str]) -> Answer:
        names = {"fieldSelector": f"metadata.name={found.name}"} if found.name else {}
        watch = self._reader.watch(found.resource, found.namespace, {**query, **names})
        return Answer(stream=watch.lines(), cut=lambda: watch.was_cut, on_close=watch.close)

    def _patch(self, asking: Asking, found: Route) -> Outcome:
        namespace = found.namespace or ""
        was_there = self._store.get(found.resource.key, (namespace, found.name)) is not None
        stored = self._writer.patch(
            found.target, asking.media, _body(asking.request), asking.options
        )
        return (200 if was_there else 201), stored.data

    def _delete(self, asking: Asking, found: Route) -> Outcome:
        query, options = asking.query, asking.options
        wanted = {
            **_body(asking.request, {}),
            **{
                key: query[key]
                for key in ("propagationPolicy", "gracePeriodSeconds")
                if key in query
            },
        }
        resource, namespace = found.resource, found.namespace or ""
        if asking.verb == "deletecollection":
            match = self._reader.select(resource, query)
            for place, stored in self._store.all(resource.key, found.namespace):
                if match is None or match(stored.body):
                    self._review_delete(resource, place, options)
                    self._deleter.delete(
                        resource, place[0], place[1], wanted, dry_run=options.dry_run
                    )
            return 200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        self._review_delete(resource, (namespace, found.name), options)
        stored, gone = self._deleter.delete(
            resource, namespace, found.name, wanted, dry_run=options.dry_run
        )
        if not gone or resource.key == ("", "pods"):
            return 200, stored.data
        details = {
            "name": found.name,
            "group": resource.group,
            "kind": resource.plural,
            "uid": stored.body["metadata"]["uid"],
        }
        return 200, {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Success",
            "details": details,
        }

    def _review_delete(self, resource: Resource, place: tuple[str, str], options: Options) -> None:
        stored = self._store.get(resource.key, place)
        if stored is not None:
            self._on_delete(
                Review(
                    operation="DELETE",
                    resource=resource,
                    body={},
                    before=stored.body,
                    user=options.user,
                    dry_run=options.dry_run,
                    warn=options.warnings.append,
                )
            )

    def _subresource(self, asking: Asking, found: Route) -> Outcome | Awaitable[Answer]:
        verb, request, query, options = asking.verb, asking.request, asking.query, asking.options
        resource, namespace, name = found.resource, found.namespace or "", found.name
        if found.subresource == "scale" and resource.scalable:
            if verb == "get":
                return 200, self._subresources.scale(resource, namespace, name)
            how = None if verb == "update" else asking.media
            return 200, self._subresources.set_scale(found.target, how, _body(request), options)
        if resource.key == ("", "pods") and found.subresource == "log" and verb == "get":
            return self._logs.read(self._reader.get(resource, namespace, name).body, query)
        if resource.key == ("", "pods") and found.subresource == "binding" and verb == "create":
            return 201, self._subresources.bind(resource, namespace, name, _body(request), options)
        if resource.key == ("", "pods") and found.subresource == "eviction" and verb == "create":
            return 201, self._subresources.evict(resource, namespace, name, _body(request), options)
        if (
            resource.key == ("", "namespaces")
            and found.subresource == "finalize"
            and verb == "update"
        ):
            return 200, self._subresources.finalize(resource, name, _body(request))
        if (
            resource.key == ("", "serviceaccounts")
            and found.subresource == "token"
            and verb == "create"
        ):
            self._reader.get(resource, namespace, name)
            return 201, _token_request(self._rights.add_account(namespace, name))
        raise Refused(404, "404 page not found")

    def _note(
        self, request: Request, verb: str, found: Route | None, status: int, *, wrote: bool
    ) -> None:
        asked = Asked(
            at=time.time(),
            verb=verb,
            resource=found.resource.qualified if found else "",
            subresource=found.subresource if found else "",
            namespace=(found.namespace or "") if found else "",
            name=found.name if found else "",
            path=request.target,
            status=status,
            wrote=wrote,
            user_agent=request.headers.get("user-agent", ""),
        )
        self._requests.add(asked)


def _token_request(token: str) -> Json:
    """The answer to a TokenRequest. These tokens do not expire."""
    return {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "metadata": {},
        "status": {"token": token, "expirationTimestamp": "2999-01-01T00:00:00Z"},
    }


def _media(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0].strip()


def _body(request: Request, empty: Any = None) -> Any:
    """The body as JSON, or YAML (which an apply may be). Raises Refused 400."""
    if not request.body:
        if empty is None:
            raise Refused(400, "the request has no body")
        return empty
    try:
        return json.loads(request.body)
    except ValueError:
        pass
    try:
        return yaml.safe_load(request.body)
    except yaml.YAMLError as e:
        raise Refused(400, f"the body of the request is neither JSON nor YAML: {e}") from e


def _object(request: Request) -> Json:
    body = _body(request)
    if not isinstance(body, dict):
        raise Refused(400, "the body of the request is not an object")
    return body


def _options(query: Mapping[str, str], request: Request) -> Options:
    agent = request.headers.get("user-agent", "unknown").split("/")[0] or "unknown"
    is_apply = _media(request) == APPLY
    if is_apply and not query.get("fieldManager"):
        agent = ""
    return Options(
        dry_run="All" in query.get("dryRun", ""),
        manager=query.get("fieldManager") or agent,
        validation=query.get("fieldValidation") or "Warn",
        force=query.get("force") in ("true", "True", "1"),
    )


def _warnings(options: Options | None) -> list[tuple[str, str]]:
    texts = [text.replace('"', '\\"') for text in (options.warnings if options else ())]
    return [("Warning", f'299 - "{text}"') for text in dict.fromkeys(texts)]


def _document(status: int, body: bytes | Json, options: Options) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Answer(status=status, body=data, headers=_warnings(options))


def _refusal(refused: Refused, options: Options | None = None) -> Answer:
    headers = _warnings(options)
    if refused.retry_after_s is not None:
        headers.append(("Retry-After", str(int(refused.retry_after_s))))
    return Answer(
        status=refused.status, body=json.dumps(refused.document()).encode(), headers=headers
    )

"""`pilotlight call`: one invocation from the terminal, and what became of a submitted one."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.calls import call_list
from pilotlight.cli.core.command import Yes, command
from pilotlight.cli.core.formatting import (
    format_milliseconds,
    format_money,
    parse_json_or_text,
    parse_pairs,
    parse_server_timing,
    parse_server_timing_descriptions,
)
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput
from pilotlight.protocol import (
    CONTENT_JSON,
    CONTENT_NDJSON,
    HEADER_COST,
    HEADER_IDEMPOTENCY_KEY,
    HEADER_REVISION,
    HEADER_SERVER_TIMING,
    HEADER_START,
    HEADER_TIMEOUT,
    HEADER_WEBHOOK,
)
from pilotlight.spec.identifiers import parse_function_path

if TYPE_CHECKING:
    from rich.text import Text

    from pilotlight.client.client import Client

_LOOK_S = 20.0


def register(root: typer.Typer) -> None:
    """Add the command."""
    command(root, "call")(call)


def call(
    session: Session,
    *,
    target: Annotated[
        str,
        typer.Argument(
            metavar="APP/FUNCTION",
            help="app/function or app/Class.method; or `get`, `list`, `redrive`.",
        ),
    ],
    arguments: Annotated[
        str | None,
        typer.Argument(
            help="JSON: an object by name, an array by position; - reads stdin. Or an id."
        ),
    ] = None,
    arg: Annotated[
        list[str] | None, typer.Option("--arg", "-a", help="name=value; may be repeated.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Write the answer's body as it came.")] = False,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="Print a generator's items as they come; with `call get`, too."
        ),
    ] = False,
    submit: Annotated[
        bool, typer.Option("--submit", help="Do not wait: print the call's id.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="With `call get`: wait until it is finished.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds to wait in all.")
    ] = None,
    webhook: Annotated[
        str, typer.Option(help="With --submit: name of the webhook that is told when it ends.")
    ] = "",
    key: Annotated[
        str, typer.Option(help="Idempotency key: repeated with it, it is the same call.")
    ] = "",
    dead: Annotated[
        bool, typer.Option("--dead", help="With `call list`: those that failed for the last time.")
    ] = False,
    state: Annotated[
        str | None,
        typer.Option(
            help="With `call list`: QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED, EXPIRED."
        ),
    ] = None,
    app_name: Annotated[
        str | None,
        typer.Option("--app", help="With `call list` and `call redrive --all`: of this app."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="With `call list`: at most so many.")
    ] = 50,
    everything: Annotated[
        bool, typer.Option("--all", help="With `call redrive`: all dead letters.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Call a function; `call get ID` looks at a submitted call, `call list` at all, `call redrive`
    sends dead letters again."""
    with session.client() as client:
        if target == "get":
            if stream:
                _print_items(client.call_stream(_id(arguments)))
            else:
                _get(session, client, _id(arguments), wait=wait, raw=raw)
            return
        if target == "list":
            call_list.list_calls(
                session, client, app=app_name, state=call_list.DEAD if dead else state, limit=limit
            )
            return
        if target == "redrive":
            call_list.redrive(
                session, client, arguments, everything=everything, app=app_name, yes=yes
            )
            return
        app, function, method = _address(target)
        name = f"{function}.{method}" if method else function
        given = call_arguments(arguments, arg or [])
        extra = {
            name: value
            for name, value in ((HEADER_WEBHOOK, webhook), (HEADER_IDEMPOTENCY_KEY, key))
            if value
        }
        if submit:
            call_id = client.submit_json(app, name, given, headers=extra)
            session.show({"id": call_id}, lambda: call_id)
        elif stream:
            _print_items(client.invoke_lines(app, name, given))
        else:
            _invoke(session, client, app, name, given, raw=raw, timeout=timeout, extra=extra)


def call_arguments(text: str | None, words: list[str]) -> Any:
    """The arguments as JSON: what was typed, or named by --arg. Raises InvalidInput."""
    if text is not None and words:
        raise InvalidInput(
            "arguments were given as JSON and with --arg", hint="Use one of the two."
        )
    if text is None:
        return parse_pairs(words, option="--arg")
    source = sys.stdin.read() if text == "-" else text
    value = parse_json_or_text(source)
    if not isinstance(value, dict | list):
        raise InvalidInput(
            f"the arguments {source[:60]!r} are neither a JSON object nor an array",
            hint="Write '{\"name\": value}' or '[value]', or use --arg.",
        )
    return value


def _address(target: str) -> tuple[str, str, str]:
    try:
        return parse_function_path(target)
    except ValueError as e:
        raise InvalidInput(str(e), hint="See what is deployed: `pilotlight app list`.") from e


def _invoke(
    session: Session,
    client: Client,
    app: str,
    name: str,
    given: Any,
    *,
    raw: bool,
    timeout: float | None,
    extra: Mapping[str, str],
) -> None:
    headers = {"content-type": CONTENT_JSON, "accept": CONTENT_JSON, **extra}
    if timeout is not None:
        headers[HEADER_TIMEOUT] = f"{timeout:g}"
    answer = client.invoke(app, name, json.dumps(given).encode(), headers=headers)
    if answer.status >= 400:
        answer.value()  # raises
    if raw:
        sys.stdout.buffer.write(answer.body)
        sys.stdout.buffer.flush()
        return
    value = body_value(answer.headers.get("content-type", ""), answer.body)
    session.show(
        {"result": value, **parse_response_headers(answer.headers)}, lambda: _pretty(value)
    )
    session.say(format_summary(parse_response_headers(answer.headers)))


def body_value(content_type: str, body: bytes) -> Any:
    """JSON, a list of the items of a stream, or text."""
    if content_type.startswith(CONTENT_NDJSON):
        return [json.loads(line) for line in body.splitlines() if line.strip()]
    return parse_json_or_text(body.decode(errors="replace"))


def parse_response_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """What the response's headers say: start kind, revision, cost, times in ms, the tier that
    weights came from, request id."""
    return {
        "start": headers.get(HEADER_START),
        "revision": headers.get(HEADER_REVISION),
        "cost": headers.get(HEADER_COST),
        "timing_ms": parse_server_timing(headers.get(HEADER_SERVER_TIMING, "")),
        "weights": parse_server_timing_descriptions(headers.get(HEADER_SERVER_TIMING, "")).get(
            "weights"
        ),
        "request_id": headers.get("x-request-id"),
    }


def format_summary(known: Mapping[str, Any]) -> str:
    """`COLD · queue 0.1 ms · start 5.40 s · exec 9.0 ms · cost 0.0000134 · v1-3f2a1c · req-…`."""
    times = [f"{name} {format_milliseconds(value)}" for name, value in known["timing_ms"].items()]
    cost = [f"cost {format_money(known['cost'])}"] if known["cost"] else []
    weights = [f"weights from {known['weights']}"] if known["weights"] else []
    return " · ".join(
        str(p)
        for p in (known["start"], *times, *weights, *cost, known["revision"], known["request_id"])
        if p
    )


def _print_items(items: Iterable[Any]) -> None:
    """One JSON text per line, as they come; what JSON cannot carry as Python shows it."""
    for item in items:
        print(json.dumps(item, ensure_ascii=False, default=repr), flush=True)


def _id(given: str | None) -> str:
    if not given:
        raise InvalidInput("which call?", hint="Write its id: pilotlight call get req-…")
    return given


def _get(session: Session, client: Client, call_id: str, *, wait: bool, raw: bool) -> None:
    record = client.call(call_id)
    while wait and record.finished_at is None and record.state in ("QUEUED", "RUNNING"):
        record = client.call(call_id, wait_s=_LOOK_S)
    body = base64.b64decode(record.result)
    if raw:
        sys.stdout.buffer.write(body)
        return
    readable = (
        body_value(record.content_type, body)
        if "json" in record.content_type
        else f"{len(body)} bytes of {record.content_type}"
    )
    shown = {**record.to_json(), "result": readable if body else None}
    session.show(
        shown,
        lambda: _pretty(
            {key: value for key, value in shown.items() if value not in (None, "", {})}
        ),
    )


def _pretty(value: Any) -> Text:
    """JSON as it is: brackets are no markup, and a long line is the terminal's to fold."""
    from rich.text import Text

    return Text(json.dumps(value, ensure_ascii=False, indent=2), no_wrap=True, overflow="ignore")

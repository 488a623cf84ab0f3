"""`pilotlight call`: call a function, and manage submitted calls."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from pilotlight.cli.commands.calls import call_list
from pilotlight.cli.core.addresses import parse_address
from pilotlight.cli.core.command import Yes, command
from pilotlight.cli.core.formatting import (
    format_milliseconds,
    format_money,
    parse_json_or_text,
    parse_pairs,
)
from pilotlight.cli.core.session import Session
from pilotlight.cli.core.signature_flags import fit_to_schema
from pilotlight.client.server_timing import (
    parse_server_timing,
    parse_server_timing_descriptions,
)
from pilotlight.core.logging_config import dump_json
from pilotlight.core.terminal import ForeignOutput
from pilotlight.errors import Forbidden, InvalidInput, NotFound
from pilotlight.protocol import (
    CONTENT_JSON,
    CONTENT_NDJSON,
    HEADER_COST,
    HEADER_CUSTOMER,
    HEADER_IDEMPOTENCY_KEY,
    HEADER_REVISION,
    HEADER_SERVER_TIMING,
    HEADER_START,
    HEADER_TIMEOUT,
    HEADER_WEBHOOK,
    CallRecord,
)

if TYPE_CHECKING:
    from rich.text import Text

    from pilotlight.client.client import Client

_LOOK_S = 20.0

Target = Annotated[
    str,
    typer.Argument(
        metavar="APP/FUNCTION",
        help="app/function or app/Class.method; or one of `get`, `list`, `redrive`.",
    ),
]
Arguments = Annotated[
    str | None,
    typer.Argument(
        help="Arguments as JSON: an object by name, an array by position; - reads stdin. With "
        "`get` and `redrive`: the call's id."
    ),
]
NamedArguments = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        "-a",
        help="Argument as name=value; may be repeated. The value is JSON or text.",
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Write the response body unchanged.")]
Stream = Annotated[
    bool,
    typer.Option(
        "--stream", help="Print a generator's items as they arrive; also with `call get`."
    ),
]
Submit = Annotated[bool, typer.Option("--submit", help="Do not wait: print the call's id.")]
Wait = Annotated[
    bool, typer.Option("--wait", help="With `call get`: wait until the call has ended.")
]
Timeout = Annotated[float | None, typer.Option(min=0.001, help="Total time to wait, in seconds.")]
Webhook = Annotated[
    str, typer.Option(help="With --submit: webhook to notify when the call ends, by name.")
]
Customer = Annotated[
    str, typer.Option(metavar="ID", help="Customer for which the call is made, as bills show it.")
]
IdempotencyKey = Annotated[
    str, typer.Option(help="Idempotency key: a repeat with the same key runs only once.")
]
InState = Annotated[
    str | None,
    typer.Option(
        help="With `call list`: only calls in this state: QUEUED, RUNNING, SUCCEEDED, FAILED, "
        "CANCELLED or EXPIRED, or DEAD: dead letters."
    ),
]
OfApp = Annotated[
    str | None,
    typer.Option(
        "--app", help="With `call list` and `call redrive --all`: only calls of this app."
    ),
]
Limit = Annotated[
    int, typer.Option(min=1, max=1000, help="With `call list`: maximum number of calls.")
]
AllDead = Annotated[bool, typer.Option("--all", help="With `call redrive`: all dead letters.")]


class CallCommand(TyperCommand):
    """The command, which says how arguments of the function are passed where it gets an option that
    it does not have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line. Exits with 2 for a wrong one."""
        known = {
            name: one for one in self.get_params(ctx) for name in (*one.opts, *one.secondary_opts)
        }
        words = iter(args)
        for word in words:
            name, equals, value = word.partition("=")
            if word == "--":
                break
            if (option := known.get(name)) is not None:
                if not equals and not getattr(option, "is_flag", True):
                    next(words, None)  # its value
            elif name.startswith("--"):
                near = get_close_matches(name, [one for one in known if one.startswith("--")])
                hint = f" Did you mean {' or '.join(near)}?" if near else ""
                ctx.fail(
                    f"No such option: {name}.{hint} An argument of the function is passed as "
                    f"--arg {name.lstrip('-').replace('-', '_') or 'name'}={value or '…'}, or "
                    f"all of them as JSON."
                )
        return super().parse_args(ctx, args)


def register(root: typer.Typer) -> None:
    """Add the command."""
    command(root, "call", cls=CallCommand)(call)


def call(
    session: Session,
    *,
    target: Target,
    arguments: Arguments = None,
    arg: NamedArguments = None,
    raw: Raw = False,
    stream: Stream = False,
    submit: Submit = False,
    wait: Wait = False,
    timeout: Timeout = None,
    webhook: Webhook = "",
    key: IdempotencyKey = "",
    customer: Customer = "",
    state: InState = None,
    app_name: OfApp = None,
    limit: Limit = 50,
    everything: AllDead = False,
    yes: Yes = False,
) -> None:
    """Call a function, or manage submitted calls.

    `call get ID` shows a submitted call, `call list` lists submitted calls, `call redrive` retries
    dead letters, which are calls that have failed their last attempt.
    """
    with session.client() as client:
        if target == "get":
            if stream:
                _print_items(client.call_stream(_id(arguments)))
            else:
                _get(session, client, _id(arguments), wait=wait, raw=raw)
            return
        if target == "list":
            call_list.list_calls(session, client, app=app_name, state=state, limit=limit)
            return
        if target == "redrive":
            call_list.redrive(
                session, client, arguments, everything=everything, app=app_name, yes=yes
            )
            return
        app, function, method = parse_address(target)
        name = f"{function}.{method}" if method else function
        given = _arguments(client, target, arguments, arg or [])
        named = {HEADER_CUSTOMER: customer} if customer else {}
        extra = named | {
            name: value
            for name, value in ((HEADER_WEBHOOK, webhook), (HEADER_IDEMPOTENCY_KEY, key))
            if value
        }
        if submit:
            call_id = client.submit_json(app, name, given, headers=extra)
            session.show({"id": call_id}, lambda: call_id)
        elif stream:
            _print_items(client.invoke_lines(app, name, given, headers=named))
        else:
            _invoke(session, client, app, name, given, raw=raw, timeout=timeout, extra=extra)


def call_arguments(text: str | None, words: list[str]) -> Any:
    """The arguments as JSON, from the argument or from --arg. Raises InvalidInput."""
    if text is not None and words:
        raise InvalidInput(
            "arguments were given as JSON and with --arg", hint="Use only one of them."
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


def _arguments(client: Client, target: str, text: str | None, words: list[str]) -> Any:
    """As `call_arguments`; the values of --arg have the types that the function accepts."""
    given = call_arguments(text, words)
    return _fitted(client, target, given, words) if words else given


def _fitted(
    client: Client, target: str, given: Mapping[str, Any], arg: list[str]
) -> Mapping[str, Any]:
    """The arguments of --arg, with text for parameters that accept text only. Asks for the
    function's signature if a value was parsed as another type."""
    if all(isinstance(value, str) for value in given.values()):
        return given
    app, function, method = parse_address(target)
    try:
        functions = client.app(app)["functions"]
    except (Forbidden, NotFound):
        return given  # a key that may only call; the call names what else is wrong
    name = function.partition("@")[0]
    schema = next(
        (
            known["schema"]
            for one in functions
            if one["name"] == name
            for known in one["spec"]["methods"]
            if known["name"] == method.partition("@")[0]
        ),
        None,
    )
    texts = {key: text for key, _, text in (word.partition("=") for word in arg)}
    return fit_to_schema(given, texts, schema)


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
        ForeignOutput(sys.stdout).write(answer.body)
        return
    value = body_value(answer.headers.get("content-type", ""), answer.body)
    session.show(
        {"result": value, **parse_response_headers(answer.headers)}, lambda: _pretty(value)
    )
    session.say(format_summary(parse_response_headers(answer.headers)))


def body_value(content_type: str, body: bytes) -> Any:
    """Decode a response body: JSON, the list of a stream's items, or text."""
    if content_type.startswith(CONTENT_NDJSON):
        return [json.loads(line) for line in body.splitlines() if line.strip()]
    return parse_json_or_text(body.decode(errors="replace"))


def parse_response_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """Read the response headers: start kind, revision, cost, times in ms, tier of the weights,
    request id."""
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
    """Format `COLD · queue 0.1 ms · start 5.40 s · exec 9.0 ms · cost 0.0000134 · v1-3f2a1c ·
    req-…`."""
    times = [f"{name} {format_milliseconds(value)}" for name, value in known["timing_ms"].items()]
    cost = [f"cost {format_money(known['cost'])}"] if known["cost"] else []
    weights = [f"weights from {known['weights']}"] if known["weights"] else []
    return " · ".join(
        str(p)
        for p in (known["start"], *times, *weights, *cost, known["revision"], known["request_id"])
        if p
    )


def _print_items(items: Iterable[Any]) -> None:
    """Print items as they arrive, one JSON value per line; the repr of what is not JSON."""
    for item in items:
        print(dump_json(item, default=repr), flush=True)


def _id(given: str | None) -> str:
    if not given:
        raise InvalidInput("no call was named", hint="Pass its id: pilotlight call get req-…")
    return given


def _get(session: Session, client: Client, call_id: str, *, wait: bool, raw: bool) -> None:
    from rich.console import Group
    from rich.text import Text

    record = client.call(call_id)
    while wait and record.finished_at is None and record.state in ("QUEUED", "RUNNING"):
        record = client.call(call_id, wait_s=_LOOK_S)
    body = base64.b64decode(record.result)
    if raw:
        ForeignOutput(sys.stdout).write(body)
        return
    readable = (
        body_value(record.content_type, body)
        if "json" in record.content_type
        else f"{len(body)} bytes of {record.content_type}"
    )
    value = readable if body else None
    if record.state == "SUCCEEDED":
        session.show({**record.to_json(), "result": value}, lambda: _pretty(value))
        session.say(_summary(record))
        return
    session.show(
        {**record.to_json(), "result": value},
        lambda: Group(Text(_summary(record)), *([] if value is None else [_pretty(value)])),
    )
    if wait:
        raise typer.Exit(1)
    if record.finished_at is None:
        session.say(f"Wait for its end: pilotlight call get {record.id} --wait")


def _summary(record: CallRecord) -> str:
    """Format `FAILED · search/embed · attempt 3 (dead letter) · queue 4 ms · …`."""
    method = f".{record.method}" if record.method else ""
    started = record.attempt or record.is_dead
    attempt = f"attempt {call_list.format_attempt(record)}" if started else "not started"
    times = {"queue": record.queued_ms, "start": record.start_ms, "exec": record.exec_ms}
    rest = format_summary(
        {
            "start": record.start_kind,
            "revision": record.revision,
            "cost": record.cost if record.finished_at is not None else "",
            "timing_ms": times if record.finished_at is not None else {},
            "weights": "",
            "request_id": record.id,
        }
    )
    return f"{record.state} · {record.app}/{record.function}{method} · {attempt} · {rest}"


def _pretty(value: Any) -> Text:
    """Format JSON without interpreting brackets as markup; the terminal folds long lines."""
    from rich.text import Text

    return Text(json.dumps(value, ensure_ascii=False, indent=2), no_wrap=True, overflow="ignore")

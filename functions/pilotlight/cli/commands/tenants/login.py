"""`pilotlight login` and `pilotlight dashboard`: sign this machine in to a platform, and a browser
to its dashboard."""

from __future__ import annotations

import getpass
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from pilotlight.cli.core.command import command
from pilotlight.cli.core.formatting import format_table
from pilotlight.cli.core.saved_profiles import free_profile_name, save_profile, saved_profile
from pilotlight.cli.core.session import RETRY_BUDGET_S, Session
from pilotlight.errors import Forbidden, InvalidInput, Unauthenticated
from pilotlight.spec.identifiers import DEFAULT_ENVIRONMENT

if TYPE_CHECKING:
    from rich.text import Text

    from pilotlight.profile import Profile

_NO_KEY_HINT = (
    "Run `pilotlight login`, or `pilotlight up` to start a platform on this machine, which writes "
    "its first key."
)


def register(root: typer.Typer) -> None:
    """Add the two commands."""
    command(root, "login")(login)
    command(root, "dashboard")(dashboard)


def login(
    session: Session,
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL]",
            help="Address of the platform, such as https://ml.example.com. Default: that of the "
            "profile, else http://127.0.0.1:8700.",
        ),
    ] = None,
    oidc: Annotated[
        bool,
        typer.Option(
            "--oidc",
            help="Sign in in a browser, by an issuer that the platform's operator has configured, "
            "instead of with an API key.",
        ),
    ] = False,
    issuer: Annotated[
        str | None,
        typer.Option(help="Which issuer, where the platform has several; implies --oidc."),
    ] = None,
) -> None:
    """Sign in to a platform: try an API key and write it to a profile.

    The key is prompted for, or read from stdin; `URL KEY` in one line also works. It never stands
    on the command line, where the shell's history would keep it. A profile that has another
    platform's key is kept. With --oidc no key is typed: a page and a code are shown, and the key
    that the profile gets ends after some hours."""
    from pilotlight import profile
    from pilotlight.cli.commands.tenants import sign_in

    is_by_issuer = oidc or issuer is not None
    words = [] if is_by_issuer else _read_words()
    selected = session.options.profile or session.environ.get("PILOTLIGHT_PROFILE")
    current = selected or profile.selected_name(session.profile_environ())
    held = saved_profile(session, current)
    typed_url = words[0] if len(words) == 2 else None
    address = (url or typed_url or (held.url if held else profile.DEFAULT_URL)).rstrip("/")
    environment = session.profile_environ().get("PILOTLIGHT_ENVIRONMENT")
    signed_in = sign_in.sign_in(session, address, issuer) if is_by_issuer else None
    key = words[-1] if signed_in is None else signed_in["key"]["secret"]
    wanted = profile.Profile(
        url=address, api_key=key, environment=environment or DEFAULT_ENVIRONMENT
    )
    known, who = _try(wanted, is_bound_allowed=environment is None)
    host = urlsplit(address).hostname or current
    name = selected or free_profile_name(session, address, preferred=current, otherwise=host)
    if signed_in is not None:
        sign_in.drop_sign_in(session, name, address)
    file = save_profile(session, known, name=name, activate=True)
    for variable in ("PILOTLIGHT_URL", "PILOTLIGHT_API_KEY"):
        if session.environ.get(variable):
            session.say(f"{variable} is set in this shell and overrides the profile: unset it")
    shown = {**_identity(known, who), "profile": name, "file": str(file)}
    ends = ""
    if signed_in is not None:
        shown["expires_at"] = signed_in["key"]["expires_at"]
        ends = f", until {sign_in.describe_expiry(shown['expires_at'])}"
    session.show(
        shown,
        lambda: (
            f"signed in to {address} as tenant {who['tenant']['name']}, scope {who['scope']}, "
            f"environment {known.environment}{ends}; written to profile {name!r} of {file}"
        ),
    )


def dashboard(
    session: Session,
    browser: Annotated[
        bool,
        typer.Option(
            "--browser/--no-browser", help="Open a browser, or only print the address for one."
        ),
    ] = True,
) -> None:
    """Open the dashboard in a browser, signed in with this profile's key.

    The address contains a one-time code instead of the key: it works once, within a minute."""
    import webbrowser

    from pilotlight.core.dashboard.dashboard_origin import DASHBOARD_PATH

    with session.client() as client:
        if client.profile.socket_path is not None:
            raise InvalidInput(
                f"{client.profile.url} is a Unix socket, which browsers cannot open",
                hint="Pass --profile NAME of a profile with an http:// or https:// address.",
            )
        made = client.sign_in_code()
    base = made["dashboard_url"] or client.profile.url.rstrip("/")
    address = f"{base}{DASHBOARD_PATH}/login#code={made['code']}"
    is_opened = browser and webbrowser.open(address)
    if is_opened:
        session.say(f"opened {base}{DASHBOARD_PATH} in a browser")
    if session.is_json or not is_opened:
        session.show(
            {"address": address, "expires_at": made["expires_at"]}, lambda: _whole_line(address)
        )
        session.say("open this address in a browser; it works once, within a minute")


def token_show(
    session: Session,
    shell: Annotated[
        bool,
        typer.Option(
            "--shell",
            help='Print the address and the key as exports: eval "$(pilotlight token show '
            '--shell)" sets them for curl and other programs.',
        ),
    ] = False,
) -> None:
    """Show which platform, tenant and key this profile uses; with --shell, also the key itself."""
    from pilotlight import profile

    used = session.profile()
    if not used.api_key:
        raise InvalidInput("this profile has no API key", hint=_NO_KEY_HINT)
    if shell:
        if used.socket_path is not None:
            raise InvalidInput(
                f"{used.url} is a Unix socket, which is no address for other programs",
                hint="Pass --profile NAME of a profile with an http:// or https:// address.",
            )
        variables = {"PILOTLIGHT_URL": used.base_url, "PILOTLIGHT_API_KEY": used.api_key}
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        session.show(variables, lambda: _whole_line(f"export {exports}"))
        return
    who = session.request(lambda client: client.whoami())
    row = {
        **_identity(used, who),
        "profile": session.options.profile or profile.selected_name(session.profile_environ()),
    }
    columns = ("url", "profile", "tenant", "key", "scope", "environment")
    session.show(row, lambda: format_table([row], {name: name for name in columns}, empty=""))


def _whole_line(text: str) -> Text:
    """A line that is copied or evaluated, so the terminal must not break it."""
    from rich.text import Text

    return Text(text, no_wrap=True, overflow="ignore")


def _read_words() -> list[str]:
    """`[key]` or `[url, key]`, from a prompt or stdin. Raises InvalidInput."""
    text = getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline()
    words = text.split()
    if len(words) not in (1, 2):
        what = "nothing was typed" if not words else f"{len(words)} words were typed"
        raise InvalidInput(
            f"{what}, expected an API key, or an address and a key",
            hint="Paste the key at the prompt, or pipe it: pilotlight login URL < key-file",
        )
    return words


def _try(wanted: Profile, *, is_bound_allowed: bool) -> tuple[Profile, dict[str, Any]]:
    """The profile with the environment that its key is bound to, and the key's identity.
    `is_bound_allowed`: no environment was asked for, so that of the key is used."""
    from dataclasses import replace

    from pilotlight.client.client import Client

    with Client(wanted, retry_budget_s=RETRY_BUDGET_S) as client:
        try:
            return wanted, client.whoami()
        except Unauthenticated as e:
            raise Unauthenticated(
                f"{wanted.url} does not accept this key: {e}",
                hint="Ask an administrator of the platform for another: `pilotlight token create`. "
                "On its machine, `pilotlight token create --local --scope admin` makes one.",
            ) from e
        except Forbidden as e:
            bound = e.detail.get("environment")
            if not is_bound_allowed or bound in (None, wanted.environment):
                raise
    return _try(replace(wanted, environment=str(bound)), is_bound_allowed=False)


def _identity(used: Profile, who: dict[str, Any]) -> dict[str, Any]:
    return {
        "url": used.url,
        "tenant": who["tenant"]["name"],
        "key": who["key"],
        "scope": who["scope"],
        "environment": who["environment"],
    }

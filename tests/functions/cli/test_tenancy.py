"""`pilotlight tenant|plan|quota|token|audit` against the real control plane."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pilotlight.cli.commands.tenants.audit import follow_audit_log, format_change
from pilotlight.client.client import Client
from pilotlight.controller.tenant_deletion import progress
from pilotlight.errors import Conflict, Forbidden, InvalidInput, NotFound, Unauthenticated
from tests.fakes.served_controller import ServedController
from tests.fakes.shell import Typist


class Shell(Typist):
    """Types commands as the operator, or with another key."""

    def __init__(self, platform: ServedController) -> None:
        self.platform = platform

    def environment(self, key: str | None) -> dict[str, str]:
        return self.platform.environ(key)


@pytest.fixture(name="shell")
def _shell(served: ServedController) -> Shell:
    return Shell(served)


@pytest.fixture(name="client")
def _client(shell: Shell) -> Iterator[Client]:
    with shell.platform.client() as client:
        yield client


# -- tenants and plans -----------------------------------------------------------------------------


def test_a_tenant_is_made_with_a_key_that_works_and_shown_once(shell: Shell) -> None:
    done = shell.run("tenant", "create", "acme", "--plan", "free", "--override", "gpus=1")
    assert done.exit_code == 0, done.output
    key = done.stdout.strip()
    assert "plan free" in done.stderr
    own = shell.json("tenant", "show", key=key)
    assert (own["name"], own["overrides"], own["use"]) == (
        "acme",
        {"gpus": 1},
        {
            "instances": None,
            "gpus": None,
            "requests_per_s": 0.0,
            "tokens_per_min": 0,
            "stored_bytes": 0,
            "pinned_bytes": 0,
            "builds_at_once": 0,
            "functions": 0,
            "result_bytes": 0,
        },
    )
    shown = shell.run("tenant", "show", key=key).stdout
    assert "gpus                   1 *" in shown
    assert "requests_per_s         5  (now 0)" in shown
    assert "stored_bytes           2.0 GiB  (now 0 B)" in shown


def test_tenants_are_listed_changed_suspended_and_resumed(shell: Shell) -> None:
    shell.run("tenant", "create", "acme")
    assert (
        shell.json(
            "tenant",
            "set",
            "acme",
            "--plan",
            "free",
            "--override",
            "burst=null",
            "--override",
            "priority=batch",
        )["terms"]["burst"]
        is None
    )
    assert "burst=-, priority=batch" in shell.run("tenant", "list").stdout
    assert shell.json("tenant", "set", "acme", "--clear", "burst")["overrides"] == {
        "priority": "batch"
    }
    assert shell.json("tenant", "set", "acme", "--clear", "all")["overrides"] == {}
    assert "Pass --yes" in shell.failed("tenant", "suspend", "acme")
    assert "acme is suspended" in shell.run("tenant", "suspend", "acme", "--yes").stdout
    assert [t["suspended"] for t in shell.json("tenant", "list")] == [False, True]
    assert shell.json("tenant", "resume", "acme")["suspended"] is False


def test_a_tenant_is_deleted_after_a_confirmation_and_its_progress_is_shown(shell: Shell) -> None:
    key = shell.run("tenant", "create", "acme").stdout.strip()
    assert "Pass --yes" in shell.failed("tenant", "delete", "acme")
    assert shell.json("tenant", "show", key=key)["name"] == "acme"
    done = shell.json("tenant", "delete", "acme", "--yes", "--no-wait")
    assert (done["suspended"], done["deletion"]["state"]) == (True, "access")
    assert "unknown or was revoked" in shell.failed("tenant", "show", key=key)
    # nothing deletes here: the controller's tasks do not run
    words = ("tenant", "delete", "acme", "--yes", "--timeout", "0")
    assert "is not deleted after 0 s: acme: step access, 0 rows" in shell.failed(*words)
    assert "step access" in shell.run("tenant", "show", "acme").stdout
    assert "deleting" in shell.run("tenant", "list").stdout
    assert "is deleted" in shell.failed("tenant", "resume", "acme")
    with shell.platform.store.read() as sql:
        found = progress.find(sql, tenant=done["id"])
    assert found is not None
    with shell.platform.store.write() as write:
        progress.complete(write, replace(found, state="rest"))
    assert "acme is deleted" in shell.run("tenant", "delete", "acme", "--yes").stdout
    assert "cannot be deleted" in shell.failed("tenant", "delete", "default", "--yes")


@pytest.mark.parametrize(
    "words, said",
    [
        (("tenant", "create", "no good"), "tenant name 'no good' is not valid"),
        (("tenant", "create", "default"), "tenant 'default' already exists"),
        (("tenant", "create", "b", "--plan", "gold"), "available: free, standard, enterprise"),
        (("tenant", "set", "nobody", "--plan", "free"), "there is no tenant 'nobody'"),
        (("tenant", "set", "default"), "no change was given"),
        (("tenant", "set", "default", "--override", "gpus"), "--override 'gpus' is not key=value"),
        (
            ("tenant", "set", "default", "--override", "gpus=-1"),
            "gpus = -1: must be between 0 and 1e+06",
        ),
        (("tenant", "plans", "gold"), "there is no plan 'gold'"),
    ],
)
def test_what_cannot_be_is_said_with_the_next_step(
    shell: Shell, words: tuple[str, ...], said: str
) -> None:
    assert said in shell.failed(*words)


def test_plans_are_shown(shell: Shell) -> None:
    assert shell.json("tenant", "plans")["default"] == "standard"
    listed = shell.run("tenant", "plans")
    assert "default plan of new tenants: standard" in listed.stderr
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == [
        "free",
        "standard",
        "enterprise",
    ]
    assert "1.0 MiB" in shell.run("tenant", "plans", "free").stdout


# -- quotas ----------------------------------------------------------------------------------------


def test_quotas_of_a_function_are_set_one_by_one(shell: Shell) -> None:
    of = ("--function", "search/embed")
    assert shell.json("quota", "set", "requests_per_s=2.5", "burst=10", *of) == {
        "requests_per_s": 2.5,
        "burst": 10,
    }
    assert shell.json("quota", "set", "concurrent=4", *of) == {
        "requests_per_s": 2.5,
        "burst": 10,
        "concurrent": 4,
    }
    assert shell.json("quota", "set", "burst=null", *of) == {"requests_per_s": 2.5, "concurrent": 4}
    assert shell.json("quota", "clear", "concurrent", *of) == {"requests_per_s": 2.5}
    assert "has no quota 'gpus'" in shell.failed("quota", "clear", "gpus", *of)
    assert "requests_per_s=2.5" in next(
        line for line in shell.run("quota", "show").stdout.splitlines() if "search/embed" in line
    )
    assert shell.json("quota", "clear", *of) == {}
    assert "No quotas." in shell.run("quota", "show", *of).stdout


def test_quotas_of_a_key_and_of_a_tenant(shell: Shell) -> None:
    key = shell.json("token", "create", "--quota", "requests_per_s=1", "--name", "ci")["id"]
    assert shell.json("quota", "set", "concurrent=2", "--key", key) == {
        "requests_per_s": 1,
        "concurrent": 2,
    }
    assert shell.json("quota", "show", "--key", key) == {"requests_per_s": 1, "concurrent": 2}
    assert f"key {key} ci" in shell.run("quota", "show").stdout
    shell.run("tenant", "create", "acme", "--override", "priority=batch")
    assert shell.json("quota", "set", "concurrent=2", "--tenant", "acme")["concurrent"] == 2
    assert shell.json("quota", "clear", "--tenant", "acme")["concurrent"] == 200
    assert shell.json("tenant", "show", "acme")["overrides"] == {"priority": "batch"}, (
        "what is no quota stays"
    )


@pytest.mark.parametrize(
    "words, said",
    [
        (("set", "concurrent=1"), "no tenant, function, key or customer was named"),
        (
            ("set", "concurrent=1", "--key", "k-1", "--tenant", "a"),
            "only one tenant, function, key or customer",
        ),
        (("set", "concurrent", "--function", "a/f"), "quota 'concurrent' is not key=value"),
        (("set", "concurrent=1", "--function", "embed"), "use app/function"),
        (
            ("set", "concurrent=-1", "--function", "a/f"),
            "concurrent = -1: must be between 0 and 1e+06",
        ),
        (("set", "wheels=1", "--function", "a/f"), "wheels: unknown quota"),
        (("set", "weight=1", "--tenant", "default"), "'weight' is not a quota"),
        (("show", "--key", "k-none"), "there is no API key k-none"),
    ],
)
def test_quotas_that_make_no_sense_are_refused_with_the_next_step(
    shell: Shell, words: tuple[str, ...], said: str
) -> None:
    assert said in shell.failed("quota", *words)


# -- keys ------------------------------------------------------------------------------------------


def test_a_key_is_bound_to_an_app_and_rotated(shell: Shell) -> None:
    old = shell.json(
        "token", "create", "--scope", "deploy", "--app", "search", "--ttl", "30d", "--name", "ci"
    )
    assert (old["app"], old["function"]) == ("search", None)
    assert "Pass --yes" in shell.failed("token", "rotate", old["id"])
    shell.platform.now += 60
    done = shell.run("token", "rotate", old["id"], "--grace", "1h")
    assert f"{old['id']} works for another 1h" in done.stderr
    new = shell.json("token", "list")[0]
    assert (new["replaces"], new["app"], new["name"]) == (old["id"], "search", "ci")
    assert "was already rotated into" in shell.failed("token", "rotate", old["id"], "--yes")
    assert "search" in shell.run("token", "list").stdout
    with shell.platform.client(done.stdout.strip()) as client:
        assert client.whoami()["bound_app"] == "search"
        with pytest.raises(Forbidden):
            client.app("other")


def test_the_operator_makes_a_key_for_a_tenant_that_lost_its_own(shell: Shell) -> None:
    shell.run("tenant", "create", "acme")
    key = shell.json("token", "create", "--tenant", "acme", "--scope", "admin")["secret"]
    assert shell.json("tenant", "show", key=key)["name"] == "acme"
    assert "first tenant" in shell.failed("token", "create", "--tenant", "acme", "--local")


def test_the_last_admin_key_is_revoked_with_force_only(shell: Shell) -> None:
    with shell.platform.client() as client:
        last = str(client.whoami()["key"])
    refused = shell.failed("token", "revoke", last, "--yes")
    assert "last admin key" in refused
    assert "--force" in refused
    assert shell.run("token", "list").exit_code == 0
    assert shell.run("token", "revoke", last, "--yes", "--force").exit_code == 0
    assert shell.run("token", "list").exit_code == 1


# -- audit -----------------------------------------------------------------------------------------


def test_the_log_is_shown_filtered_and_as_json(shell: Shell) -> None:
    shell.run("tenant", "create", "acme")
    shell.run("tenant", "set", "acme", "--plan", "free")
    entries = shell.json("audit", "--tenant", "acme", "--action", "tenant.*")
    assert [entry["action"] for entry in entries] == ["tenant.change", "tenant.create"]
    text = shell.run("audit", "--tenant", "*", "--action", "tenant.change").stdout
    assert "plan: standard → free" in text
    assert "127.0.0.1" in text
    assert shell.json("audit", "--limit", "1")[0]["action"] == "key.create"
    assert shell.json("audit", "--since", "2031-01-01") == []
    assert "No changes." in shell.run("audit", "--actor", "k-none").stdout
    assert "--follow and --until" in shell.failed("audit", "--follow", "--until", "1h")


def test_following_shows_each_change_once_in_order(shell: Shell, client: Client) -> None:
    waits = 0

    def wait(_: float) -> None:
        nonlocal waits
        waits += 1
        if waits in (2, 3):
            for n in range(2):
                client.create_environment(f"e{waits}-{n}")

    shown = follow_audit_log(client, {"action": "environment.*"}, last=5, wait=wait)
    assert [next(shown)["subject"] for _ in range(5)] == ["main", "e2-0", "e2-1", "e3-0", "e3-1"]


@pytest.mark.parametrize(
    "before, after, said",
    [
        (None, {"a": 1}, '{"a": 1}'),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, "b: 2 → 3"),
        ({"a": 1}, {}, "a: 1 → -"),
        ({"a": "x" * 99}, None, None),
        (None, None, ""),
    ],
)
def test_a_change_in_short(before: Any, after: Any, said: str | None) -> None:
    text = format_change({"before": before, "after": after})
    assert text == said if said is not None else (len(text), text[-1]) == (60, "…")


# -- the client ------------------------------------------------------------------------------------


def test_the_client_reads_the_log_page_by_page(shell: Shell, client: Client) -> None:
    for _ in range(5):
        client.create_key()
    everything = [entry["id"] for entry in client.audit()]
    assert len(everything) == 8
    assert [entry["id"] for entry in client.audit(limit=3)] == everything[:3]


def test_the_client_raises_what_the_platform_refuses(shell: Shell, client: Client) -> None:
    made = client.create_tenant("acme", plan="free")
    with pytest.raises(Conflict):
        client.create_tenant("acme")
    with pytest.raises(InvalidInput):
        client.change_tenant("acme", overrides={"wheels": 4})
    with pytest.raises(NotFound):
        client.tenant("nobody")
    with shell.platform.client(made["key"]["secret"]) as own:
        with pytest.raises(Forbidden):
            own.tenants()
        client.change_tenant("acme", suspended=True)
        with pytest.raises(Forbidden, match="suspended"):
            own.create_key()
        key = own.whoami()["key"]
        client.change_tenant("acme", suspended=False)
        with pytest.raises(Conflict, match="last admin key"):
            own.set_key_expiry(key, ttl_s=60)
        assert (
            own.set_key_expiry(key, ttl_s=60, force=True)["expires_at"] == shell.platform.now + 60
        )
        shell.platform.now += 61
        with pytest.raises(Unauthenticated):
            own.whoami()

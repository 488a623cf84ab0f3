"""`pilotlight traffic …`, against the real control plane."""

from __future__ import annotations

from tests.functions.cli.test_releases import Shell, _shell

__all__ = ["_shell"]  # fixtures
WHERE = "search/embed"


def revisions(shell: Shell, count: int = 3) -> list[str]:
    return [str(shell.deploy(cpu=float(number + 1))["revision"]) for number in range(count)]


def test_a_split_names_revisions_tags_and_aliases_and_one_gets_the_rest(shell: Shell) -> None:
    first, second, third = revisions(shell)
    shell.json("traffic", "tag", WHERE, "next", second)
    found = shell.json("traffic", "set", WHERE, "stable", "next=10", "v1=5", "-m", "a look")
    assert found["weights"] == {third: 85, second: 10, first: 5}
    shown = shell.run("traffic", "show", WHERE).output
    for part in ("85 %", "10 %", "tag @next", "alias stable", "by request"):
        assert part in shown
    assert shell.json("app", "history", "search")[0]["message"] == "a look"


def test_tags_pins_units_and_shadows_come_and_go(shell: Shell) -> None:
    first, second = revisions(shell, 2)
    assert shell.json("traffic", "pin", WHERE, "default", "v1")["pins"] == {"default": first}
    assert shell.json("traffic", "pin", WHERE, "default", "--remove")["pins"] == {}
    assert shell.json("traffic", "sticky", WHERE, "header:x-user")["sticky"] == "header:x-user"
    copied = shell.json("traffic", "shadow", WHERE, "v1", "--percent", "20")["shadow"]
    assert copied == {"revision": first, "percent": 20.0, "max_compute": 0.15}
    assert "shadow of 20 %" in shell.run("traffic", "show", WHERE).output
    assert shell.json("traffic", "shadow", WHERE, "--remove")["shadow"] is None
    assert shell.json("traffic", "show", WHERE)["weights"] == {second: 100}


def test_who_saw_another_generation_is_told_what_to_do(shell: Shell) -> None:
    revisions(shell, 2)
    seen = str(shell.json("traffic", "show", WHERE)["generation"])
    shell.json("traffic", "sticky", WHERE, "key")
    assert "has changed" in shell.failed("traffic", "set", WHERE, "v1=100", "--generation", seen)


def test_mistakes_are_named_with_the_next_step(shell: Shell) -> None:
    revisions(shell, 1)
    assert "add up to 90" in shell.failed("traffic", "set", WHERE, "v1=90")
    assert "whole number" in shell.failed("traffic", "set", WHERE, "v1=a")
    assert "only one revision can get the rest" in shell.failed(
        "traffic", "set", WHERE, "v1", "stable"
    )
    assert "has no revision" in shell.failed("traffic", "tag", WHERE, "next", "v7")
    assert "--remove" in shell.failed("traffic", "tag", WHERE, "next")
    assert "APP/FUNCTION" in shell.failed("traffic", "show", "nothing")
    assert "there is no function" in shell.failed("traffic", "show", "search/nobody")

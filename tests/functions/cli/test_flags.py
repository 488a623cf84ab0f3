"""A function's parameters as options of `pilotlight run`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from pilotlight.cli.core.signature_flags import parse_flags
from pilotlight.errors import InvalidInput


def sample(
    name: str,
    count: int = 1,
    share: float | None = None,
    is_loud: bool = False,
    tags: list[str] | None = None,
) -> None: ...


def anything(*words: str, **options: Any) -> None: ...


def parse(*words: str, of: Any = sample) -> tuple[list[Any], dict[str, Any]]:
    return parse_flags(inspect.signature(of, eval_str=True), words, what="sample")


def test_values_become_what_the_annotations_say() -> None:
    assert parse("--name", "7", "--count=3", "--share", "0.5") == (
        [],
        {"name": "7", "count": 3, "share": 0.5},
    )
    assert parse("--name=x", "--share", "null", "--tags", '["a", "b"]')[1] == {
        "name": "x",
        "share": None,
        "tags": ["a", "b"],
    }


def test_flags_need_no_value_and_can_be_negated() -> None:
    assert parse("--name=x", "--is-loud")[1]["is_loud"] is True
    assert parse("--name=x", "--no-is-loud")[1]["is_loud"] is False
    assert parse("--name=x", "--is-loud=no")[1]["is_loud"] is False


def test_positional_words_fill_parameters_in_order() -> None:
    assert parse("Ada", "2") == (["Ada", 2], {})
    assert parse("a", "b", "--depth", "3", of=anything) == (["a", "b"], {"depth": 3})


@pytest.mark.parametrize(
    "words, what",
    [
        (("--nme", "x"), "no parameter --nme"),
        (("--name",), "--name needs a value"),
        (("--name=x", "--count", "many"), "--count 'many' is not of type int"),
        ((), "missing a required argument: 'name'"),
        (("a", "1", "0.1", "yes", "[]", "more"), "'more' is one too many"),
        (("a", "--name", "b"), "multiple values for argument 'name'"),
    ],
)
def test_mistakes_name_the_option(words: tuple[str, ...], what: str) -> None:
    with pytest.raises(InvalidInput, match=what):
        parse(*words)

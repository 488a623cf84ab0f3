"""What callers are told of arguments that do not fit, and of methods that do not exist."""

from __future__ import annotations

from typing import Any

import pytest

from pilotlight.errors import InvalidInput, NotFound
from pilotlight.spec.function import FunctionKind, MethodSpec
from tests.fakes.routes import spec_of, target_of


@pytest.mark.parametrize(
    "body, message",
    [
        (b'{"x": 1, "z": 2}', "argument 'z': there is no such parameter; the parameters are: x, y"),
        (b'{"y": 1}', "argument 'x': is required"),
        (b'{"x": "one"}', 'argument \'x\': "one" is not of type "integer"'),
    ],
)
def test_arguments_that_do_not_fit_are_named_with_what_would(body: bytes, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        target_of(spec_of()).check("").check(body)
    assert str(refused.value) == message
    assert [told["parameter"] for told in refused.value.detail["errors"]] == [message.split("'")[1]]


def test_a_function_without_parameters_says_so() -> None:
    nothing: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    target = target_of(spec_of(methods=(MethodSpec(schema=nothing),)))
    with pytest.raises(InvalidInput, match="no such parameter; the parameters are: none"):
        target.check("").check(b'{"x": 1}')


@pytest.mark.parametrize(
    "name, message",
    [
        ("", "is a class: call a method of it, such as shop/hello.add; its methods are: add, get"),
        ("put", "has no method 'put'; its methods are: add, get"),
    ],
)
def test_a_method_that_does_not_exist_is_answered_with_those_that_do(
    name: str, message: str
) -> None:
    methods = (MethodSpec(name="get"), MethodSpec(name="add"))
    target = target_of(spec_of(methods=methods, kind=FunctionKind.CLASS))
    with pytest.raises(NotFound) as refused:
        target.method(name)
    assert str(refused.value) == f"shop/hello {message}"

"""Declarations of web servers, and what cannot be one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pilotlight
from pilotlight.errors import InvalidInput
from pilotlight.sdk.unsupported import NotSupported
from pilotlight.spec.engines import LanguageModel
from pilotlight.spec.function import Clocks, FunctionKind, FunctionSpec, MethodSpec
from pilotlight.spec.web_servers import WebServerSpec

app = pilotlight.App("servers")
web_server: Any = pilotlight.web_server


@app.function(name="by-process")
@pilotlight.concurrent(max_inputs=10)
@pilotlight.web_server(8000, startup_timeout=600, example="/health")
def by_process() -> None:
    subprocess.Popen(["server"])


@app.function(name="llama")
@pilotlight.web_server(8000, openai=True)
def llama() -> None: ...


LIMITS = pilotlight.TokenLimits(max_output_tokens=64)


@app.function(name="proxy")
@pilotlight.web_server(8000, openai=True, model=["a", "org/b:1"], max_model_len=4096, limits=LIMITS)
def proxy() -> None: ...


@app.cls()
class Site:
    @pilotlight.enter()
    def load(self) -> None: ...

    @pilotlight.method()
    def count(self) -> int:
        return 1

    @pilotlight.web_server(port=8001)
    def serve(self) -> None: ...


def test_a_web_server_is_a_web_application_with_a_port() -> None:
    process, member, methods = (app.declarations[n] for n in ("by-process", "Site-serve", "Site"))
    assert process.policies["web_server"] == WebServerSpec(
        port=8000, startup_s=600.0, example="/health"
    )
    assert (process.kind, process.methods()) == (FunctionKind.ASGI, (MethodSpec(),))
    assert process.scaling.max_inputs == 10
    assert process.clocks.startup_s == 750.0  # with room for the worker
    assert member.policies["web_server"] == WebServerSpec(port=8001)
    assert (member.qualname, member.clocks.startup_s) == ("Site.serve", 300.0)
    assert (methods.kind, methods.policies["web_server"]) == (FunctionKind.CLASS, None)


def test_a_server_that_speaks_openais_api_is_a_language_model() -> None:
    def spec(name: str) -> FunctionSpec:
        found = app.declarations[name]
        given = {key: found.policies[key] for key in ("web_server", "limits")}
        return spec_of(name=name, **given)

    assert spec("llama").limits is None
    assert spec("llama").language_model == LanguageModel(
        served="llama", others=(), max_model_len=131_072, task=None, is_engine=False
    )
    assert spec("proxy").limits == LIMITS
    assert spec("proxy").language_model == LanguageModel(
        served="a", others=("org/b:1",), max_model_len=4096, task=None, is_engine=False
    )
    assert spec_of().language_model is None
    with pytest.raises(InvalidInput, match="limits: function 'f' is no language model"):
        spec_of(limits=LIMITS)


def plain() -> None: ...
async def coroutine() -> None: ...
def generator() -> Iterator[int]:
    yield 1


def taking(x: int) -> None: ...


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: web_server(plain), "the first argument must be the port"),
        (lambda: web_server("8000"), "'8000'): the first argument must be the port"),
        (lambda: web_server(80), "port = 80: must be 1024 to 65535"),
        (lambda: web_server(65536), "port = 65536: must be 1024 to 65535"),
        (lambda: web_server(8000, startup_timeout=0), "startup_timeout = 0: must"),
        (lambda: web_server(8000, startup_timeout="5"), "must be a number of seconds"),
        (lambda: web_server(8000, example="health"), "example = 'health': must be a"),
        (lambda: web_server(8000, example="/a b"), "example = '/a b': must be a path"),
        (lambda: web_server(8000, requires_proxy_auth=False), "callers need a key"),
        (lambda: web_server(8000, wait=1), "unknown option wait="),
        (lambda: web_server(8000, openai="yes"), "openai='yes'): must be True or"),
        (lambda: web_server(8000, model="m"), "model=…): only for a server that speaks"),
        (lambda: web_server(8000, max_model_len=1), "max_model_len=…): only for a"),
        (lambda: web_server(8000, limits=pilotlight.TokenLimits()), "limits=…): only for a"),
        (lambda: web_server(8000, openai=True, model=7), "model=7): must be a name, or a list"),
        (lambda: web_server(8000, openai=True, model=""), "model = '': must be the name"),
        (lambda: web_server(8000, openai=True, model=["a", "a"]), "model: two names are equal"),
        (lambda: web_server(8000, openai=True, max_model_len=0), "max_model_len = 0: must"),
        (lambda: web_server(8000, openai=True, max_model_len="8k"), "must be a number of tok"),
        (lambda: web_server(8000, openai=True, limits=1), "limits=1): expected pilotlight.T"),
        (lambda: web_server(8000)(coroutine), "but a coroutine or a generator"),
        (lambda: web_server(8000)(generator), "but a coroutine or a generator"),
        (lambda: web_server(8000)(taking), "but takes x: nothing passes it"),
        (lambda: web_server(8000)(int), "decorates functions and methods"),
    ],
)
def test_what_cannot_be_a_web_server_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        make()


def test_calls_of_a_web_server_are_not_batched() -> None:
    batched = pilotlight.batched(max_batch_size=2, wait_ms=1)

    def above() -> None: ...
    def below() -> None: ...

    with pytest.raises(InvalidInput, match="only calls can be batched"):
        web_server(8000)(batched(above))
    with pytest.raises(InvalidInput, match="only calls can be batched"):
        pilotlight.App("x").function()(batched(web_server(8000)(below)))


@pytest.mark.parametrize("option", ["label", "custom_domains"])
def test_options_of_modals_are_refused_with_the_way_out(option: str) -> None:
    with pytest.raises(NotSupported, match=f"{option}= is not supported"):
        web_server(8000, **{option: "x"})


def spec_of(**changes: Any) -> FunctionSpec:
    values: dict[str, Any] = {
        "name": "f",
        "bundle": "0" * 64,
        "kind": FunctionKind.ASGI,
        "methods": (MethodSpec(),),
        "web_server": WebServerSpec(port=8000, startup_s=30.0),
    }
    return FunctionSpec(**{**values, **changes})


def test_a_server_that_needs_longer_than_its_start_is_refused() -> None:
    with pytest.raises(
        InvalidInput, match=r"startup_timeout = 30 s, but a start of 'f' may take 20 s"
    ):
        spec_of(clocks=Clocks(startup_s=20.0))


def test_only_a_web_application_has_a_server() -> None:
    with pytest.raises(InvalidInput, match="only functions of kind 'asgi' have one"):
        spec_of(kind=FunctionKind.FUNCTION)

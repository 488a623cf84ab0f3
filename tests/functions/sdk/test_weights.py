"""`Weights` says the same thing here and in a worker, wherever the files lie, and gives no key
away."""

from __future__ import annotations

import pickle

import pytest

from pilotlight import Secret, Weights
from pilotlight.errors import InvalidInput, NotFound


@pytest.mark.parametrize(
    "source, name",
    [
        ("s3://bucket/models/MiniLM-L6/", "MiniLM-L6"),
        ("s3://bucket", "bucket"),
        ("hf://org/name.v2@refs/pr/1", "name-v2"),
        ("hf://org/name", "name"),
        ("https://host/path/model%20one.gguf?key=x", "model-one-gguf"),
        (["https://host/models/minilm/a", "https://host/models/minilm/b"], "minilm"),
    ],
)
def test_remote_weights_are_named_after_the_last_part(source: str | list[str], name: str) -> None:
    weights = Weights(source)
    assert weights.name == name
    assert not weights.is_directory
    assert Weights(source, name="other").name == "other"


@pytest.mark.parametrize("source", ["gs://bucket/x", [], ["s3://bucket/x"], [1]])
def test_what_can_never_be_read_is_refused_at_once(source: str | list[str]) -> None:
    with pytest.raises(InvalidInput, match="Weights"):
        Weights(source)


def test_remote_weights_have_no_path_here_but_a_way_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights("hf://org/name@main")
    with pytest.raises(NotFound, match=r"pilotlight weights pull name \./name"):
        _ = weights.path
    with pytest.raises(NotFound, match=r"pilotlight weights pull llm \./model"):
        _ = Weights.named("llm", mount="model").path
    monkeypatch.setenv("PILOTLIGHT_WEIGHTS", '{"name": "/models/name"}')
    assert str(weights.path) == "/models/name"


def test_names_that_nothing_can_have_are_refused() -> None:
    with pytest.raises(InvalidInput, match="weights name"):
        Weights.named("no good")
    assert repr(Weights.named("llm")) == "<Weights llm from the platform's llm>"


def test_keys_are_neither_shown_nor_packed() -> None:
    weights = Weights("https://user:pass@host/model?signature=abc", secret="t0ken")
    assert repr(weights) == "<Weights model from https://host/model>"
    assert b"t0ken" not in pickle.dumps(weights)
    assert weights.token() == "t0ken"


def test_a_secret_is_a_token_or_variables() -> None:
    one = Secret.from_dict({"TOKEN": "t0ken"})
    assert Weights("https://host/a", secret=one).token() == "t0ken"
    assert Weights("hf://org/name", secret=one).token() == "t0ken"
    assert Weights("s3://bucket", secret=one).token() is None
    assert Weights("hf://org/name", secret=Secret.from_dict({"HF_TOKEN": "x"})).variables(
        {"A": "1"}
    ) == {"A": "1", "HF_TOKEN": "x"}
    assert Weights("s3://bucket").variables({"A": "1"}) == {"A": "1"}
    with pytest.raises(InvalidInput, match="from_dotenv"):
        Weights("hf://org/name", secret=Secret.from_name("hub")).token()


@pytest.mark.parametrize("source", ["http://user:sekret@[::1/a", ["http://user:sekret@[::1/a"]])
def test_what_is_no_address_is_refused_and_not_shown(source: str | list[str]) -> None:
    with pytest.raises(InvalidInput, match="invalid URL") as refused:
        Weights(source)
    assert "sekret" not in str(refused.value)

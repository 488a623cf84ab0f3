"""`Image.from_dockerfile`: a plain Dockerfile becomes the steps that an image has, and what an
image cannot have is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

import pilotlight
from pilotlight.errors import InvalidInput, NotFound
from pilotlight.sdk.decorator_metadata import PilotlightWarning
from pilotlight.sdk.image import Image, LocalCopy

PLAIN = r"""# syntax=docker/dockerfile:1
FROM debian:trixie-slim AS base
ENV A=1 B="two words"
ENV C three words
WORKDIR /app
COPY requirements.txt .
COPY one.txt two.txt data/
RUN apt-get update && \
    # a comment between
    apt-get install -y curl
WORKDIR sub
USER root
COPY data /data
RUN ["echo", "a b"]
"""


def image_of(directory: Path, text: str, **options: str) -> Image:
    (directory / "Dockerfile").write_text(text)
    for name in ("requirements.txt", "one.txt", "two.txt"):
        (directory / name).touch()
    (directory / "data").mkdir(exist_ok=True)
    return Image.from_dockerfile(directory / "Dockerfile", **options)


def test_a_plain_dockerfile_becomes_steps(tmp_path: Path) -> None:
    image = image_of(tmp_path, PLAIN, add_python="3.11")
    steps = [
        (str(step.source.relative_to(tmp_path)), step.target)
        if isinstance(step, LocalCopy)
        else step
        for step in image.steps
    ]
    installed = "apt-get update &&     apt-get install -y curl"
    assert image.python_version == "3.11"
    assert steps == [
        {"op": "from", "image": "debian:trixie-slim"},
        {"op": "env", "values": {"A": "1", "B": "two words"}},
        {"op": "env", "values": {"C": "three words"}},
        {"op": "run", "commands": ["mkdir -p -- /app"]},
        ("requirements.txt", "/app/requirements.txt"),
        ("one.txt", "/app/data/one.txt"),
        ("two.txt", "/app/data/two.txt"),
        {"op": "run", "commands": [f"cd /app || exit 1\n{installed}"]},
        {"op": "run", "commands": ["mkdir -p -- /app/sub"]},
        ("data", "/data"),
        {"op": "run", "commands": ["cd /app/sub || exit 1\necho 'a b'"]},
    ]


def test_what_is_about_containers_is_ignored_with_a_warning(tmp_path: Path) -> None:
    for line in ('CMD ["python"]', "ENTRYPOINT x", "EXPOSE 80", "LABEL a=b"):
        with pytest.warns(PilotlightWarning, match=f"line 2: {line.split()[0]} has no effect"):
            assert len(image_of(tmp_path, f"FROM debian\n{line}\n").steps) == 1


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "must be FROM"),
        ("RUN true", "must be FROM"),
        ("ARG A=1\nFROM debian", "line 1: ARG is not supported: use the value"),
        ("FROM debian\nFROM debian", "line 2: a second FROM"),
        ("FROM --platform=x debian", "FROM --platform=x"),
        ("FROM debian as", "write FROM image"),
        ("FROM debian:$TAG", "the variable"),
        ("FROM debian\nADD a /a", "ADD is not supported: use COPY"),
        ("FROM debian\nVOLUME /a", "VOLUME is not supported"),
        ("FROM debian\nSHELL []", "SHELL is not supported"),
        ("FROM debian\nFROB x", "'FROB' is no instruction"),
        ("FROM debian\nUSER app", "USER app"),
        ("FROM debian\nRUN --mount=type=cache true", "RUN --mount"),
        ("FROM debian\nRUN <<EOF\ntrue\nEOF", "a here-document"),
        ("FROM debian\nCOPY --from=x a /a", "COPY --from"),
        ("FROM debian\nCOPY *.txt /a", "the pattern"),
        ("FROM debian\nCOPY ../a /a", "outside of the context"),
        ("FROM debian\nCOPY one.txt b", "before it"),
        ("FROM debian\nWORKDIR /root", "/root, the home"),
        ("FROM debian\nWORKDIR $HOME", "the variable"),
        ('FROM debian\nENV A="', "line 2: ENV: No closing quotation"),
        ("FROM debian\nCOPY [1] /a", "COPY"),
        ("# escape=`\nFROM debian", "another escape character"),
        ("FROM debian\nCOPY one.txt /usr/lib/one", "the system's"),
    ],
)
def test_what_an_image_cannot_have_is_refused_with_its_line(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        image_of(tmp_path, text)
    assert said in str(raised.value)


def test_files_that_are_missing_or_chosen_by_dockerignore(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"line 2: .*absent does not exist"):
        image_of(tmp_path, "FROM debian\nCOPY absent /a")
    with pytest.raises(NotFound, match="no-such-file"):
        Image.from_dockerfile(tmp_path / "no-such-file")
    (tmp_path / ".dockerignore").touch()
    assert image_of(tmp_path, "FROM debian\nCOPY one.txt /a")
    with pytest.raises(InvalidInput, match="dockerignore"):
        image_of(tmp_path, "FROM debian\nCOPY data /a")
    with pytest.raises(InvalidInput, match="build_args is not supported"):
        pilotlight.Image.from_dockerfile(tmp_path / "Dockerfile", build_args={})


def test_links_out_of_the_context_are_not_followed(tmp_path: Path) -> None:
    context, outside = tmp_path / "context", tmp_path / "id_rsa"
    context.mkdir()
    outside.write_text("a key")
    inner = context / "data"
    inner.mkdir()
    (inner / "inside").symlink_to("../one.txt")
    (inner / "nowhere").symlink_to("/no/such/file")
    text = "FROM debian\nCOPY data /data\nCOPY link /link"
    (context / "link").symlink_to("one.txt")
    assert image_of(context, text)
    (context / "link").unlink()
    (context / "link").symlink_to(outside)
    with pytest.raises(InvalidInput, match=r"line 3: .*a link out of the context"):
        image_of(context, text)
    (inner / "deep").mkdir()
    (inner / "deep" / "link").symlink_to(tmp_path)
    with pytest.raises(InvalidInput, match=r"line 2: .*deep/link.*a link out of the context"):
        image_of(context, text)

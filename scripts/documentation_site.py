"""Hooks of mkdocs.yml: what the documentation site has beyond the pages of docs/.

A comment `<!-- generated: NAME -->` in a page is replaced by reference text that is made from the
code: `commands` from the parsers of the command line, `http` from the OpenAPI document, `settings`
from platform.yaml, `metrics` from where the processes declare them. Files of the repository that
pages link to outside docs/ are part of the site as text, below `source/`.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "functions")]

_MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\(([^()\s#:]+)(#[\w-]+)?\)")
_PROCESSES = {
    "activator": "Activator",
    "functions/pilotlight/controller": "Controller",
    "snapshotter": "Node agent",
    "weight_cache": "Weight cache",
}
"""Folders whose metrics are listed, and the process that serves them."""
_KINDS = ("counter", "gauge", "histogram")
_EVERYWHERE = ("authorization", "pilotlight-environment")
"""Headers of every operation, which the page explains once."""
_METRIC = re.compile(r"pilotlight_[a-z0-9_]+\Z")
_FUNCTION_LABELS = ("tenant", "app", "function")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to."""
    from mkdocs.structure.files import File

    for name in sorted({name for file in files for name in _outside(file)}):
        path = ROOT / name
        if path.is_file():
            content = path.read_text()
            files.append(File.generated(config, f"source/{name}.txt", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is generated, and lead links out of docs/ to the files below `source/`."""
    del config, files
    folder = Path(page.file.src_uri).parent

    def lead(match: re.Match[str]) -> str:
        name = os.path.normpath(Path("docs") / folder / match[2])
        if (ROOT / name).is_dir():
            return f"{match[1]} (`{name}`)"
        if name.startswith("docs/") or not (ROOT / name).is_file():
            return match[0]
        return f"[{match[1]}]({os.path.relpath(f'source/{name}.txt', folder)})"

    return _MARK.sub(lambda mark: GENERATED[mark[1]](), _LINK.sub(lead, markdown))


def _outside(file: Any) -> Iterator[str]:
    if file.is_documentation_page():
        folder = Path("docs") / Path(file.src_uri).parent
        for _, url, _ in _LINK.findall(file.content_string):
            name = os.path.normpath(folder / url)
            if not name.startswith(("docs/", "..")):
                yield name


# -- the command line ------------------------------------------------------------------------------


def commands() -> str:
    """Every command with its usage, arguments and options, from the parsers themselves."""
    import typer
    from typer.core import TyperGroup

    from pilotlight.cli.core.command import COMMON_PANEL
    from pilotlight.cli.main import build

    out: list[str] = []

    def add(command: Any, parent: typer.Context | None, name: str) -> None:
        context = typer.Context(command, parent=parent, info_name=name)
        if command.hidden:
            return
        if isinstance(command, TyperGroup):
            for inner in command.list_commands(context):
                found = command.get_command(context, inner)
                if found is not None:
                    add(found, context, inner)
            return
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        out.extend([f"### {context.command_path}", "", f"    {usage}", "", _plain(command.help)])
        rows = [
            row
            for parameter in command.params
            if getattr(parameter, "rich_help_panel", None) != COMMON_PANEL
            and (row := parameter.get_help_record(context)) is not None
        ]
        if rows:
            out.extend(["", "| | |", "|---|---|"])
            out.extend(f"| `{_cell(name)}` | {_plain(_cell(text))} |" for name, text in rows)
        out.append("")

    add(typer.main.get_command(build()), None, "pilotlight")
    return "\n".join(out)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _plain(text: str | None) -> str:
    """A help text as Markdown that shows its characters."""
    kept = (text or "").replace("\b\n", "").strip()
    return re.sub(r"(`[^`]*`)|([<>*_\[\]])", lambda m: m[1] or f"\\{m[2]}", kept)


# -- HTTP ------------------------------------------------------------------------------------------


def http() -> str:
    """Every public operation, from the OpenAPI document that a platform serves."""
    from pilotlight.controller.http_app import openapi_document

    document = openapi_document()
    groups: dict[str, list[str]] = {}
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["other"])[0]
            groups.setdefault(tag, []).append(_operation(method.upper(), path, operation))
    groups["schemas"] = [_schema(name, schema) for name, schema in sorted(schemas.items())]
    return "\n".join(
        f"### {tag.capitalize()}\n\n" + "\n".join(texts) for tag, texts in groups.items()
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    out = [f"#### `{method} {path}`", ""]
    text = operation.get("description") or operation.get("summary") or ""
    out += [_plain(text), ""]
    parameters = [
        one
        for one in operation.get("parameters", ())
        if "name" in one and one["name"].lower() not in _EVERYWHERE
    ]
    if parameters:
        out += ["| parameter | in | type | |", "|---|---|---|---|"]
        out += [
            f"| `{one['name']}`{'' if one.get('required') else ' (optional)'} | {one['in']} | "
            f"{_cell(_type(one.get('schema', {})))} | {_plain(_cell(one.get('description', '')))} |"
            for one in parameters
        ]
        out.append("")
    for kind, media in operation.get("requestBody", {}).get("content", {}).items():
        out += [f"Body: `{kind}`, {_cell(_type(media.get('schema', {})))}", ""]
    answers = [
        f"{status}: {_answer(answer)}"
        for status, answer in operation.get("responses", {}).items()
        if status not in ("4XX", "5XX")
    ]
    return "\n".join([*out, "; ".join(answers), ""])


def _answer(answer: Mapping[str, Any]) -> str:
    text = answer.get("description", "").replace("Successful Response", "")
    types = [
        f"`{kind}`, {_type(media.get('schema', {}))}"
        for kind, media in answer.get("content", {}).items()
    ]
    return "; ".join(filter(None, [_plain(_cell(text)), *map(_cell, types)])) or "no body"


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"| `{field}`{'' if field in required else ' (optional)'} | {_cell(_type(kind))} | "
        f"{_plain(_cell(kind.get('description', '')))} |"
        for field, kind in schema.get("properties", {}).items()
    ]
    table = ["| field | type | |", "|---|---|---|", *rows] if rows else [_cell(_type(schema))]
    return "\n".join([f"#### {name}", "", _plain(schema.get("description")), "", *table, ""])


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[key]))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any JSON"))


# -- settings --------------------------------------------------------------------------------------


def settings() -> str:
    """Every section of platform.yaml: keys, defaults, and what its comments say of them."""
    text = (ROOT / "platform.yaml").read_text()
    defaults = yaml.safe_load(text)
    out: list[str] = []
    above: list[str] = []
    section = key = ""
    rows: dict[tuple[str, str], list[str]] = {}
    for line in text.splitlines():
        if (found := re.match(r"(\w+):\s*$", line)) is not None:
            section = found[1]
            out += [f"## {section}", "", _plain(" ".join(above)), "", f"@{section}@", ""]
            above = []
        elif line.startswith("#"):
            above.append(line.lstrip("# "))
        elif (found := re.match(r"  (\w+):.*?(?:\s#\s(.*))?$", line)) is not None:
            key = found[1]
            rows[section, key] = [found[2] or ""]
        elif (found := re.match(r"\s+# (.*)$", line)) is not None:
            rows[section, key].append(found[1])
        elif not line.strip():
            above = []
    page = "\n".join(out)
    for section, values in defaults.items():
        table = ["| key | default | |", "|---|---|---|"]
        for key, value in values.items():
            meaning = _plain(_cell(" ".join(rows[section, key])))
            table.append(f"| `{key}` | {_default(value)} | {_linked(meaning)} |")
        page = page.replace(f"@{section}@", "\n".join(table))
    return page


def _default(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n")
    return f"`{_cell(text)}`"


def _linked(text: str) -> str:
    return re.sub(r"docs/([\w/-]+\.md)(#[\w-]+)?", r"[\g<0>](../\1\2)", text)


# -- metrics ---------------------------------------------------------------------------------------


def metrics() -> str:
    """Every metric, by the process that serves it, from where the code declares it."""
    out = []
    for folder, process in _PROCESSES.items():
        found = metrics_of(folder)
        out += [f"## {process}", "", "| metric | labels | |", "|---|---|---|"]
        out += [
            f"| `{name}` | {', '.join(f'`{label}`' for label in labels)} | {_plain(_cell(text))} |"
            for name, (labels, text) in sorted(found.items())
        ]
        out.append("")
    return "\n".join(out)


def metrics_of(folder: str) -> dict[str, tuple[tuple[str, ...], str]]:
    """Metrics that the modules of a folder declare: name as it is scraped → labels, help."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text()
        if "prometheus_client" not in text and "pilotlight_" not in text:
            continue
        tree = ast.parse(text)
        prefix = next(
            (
                f"{str(node.value.value).rstrip('_')}_"
                for node in tree.body
                if isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == "_PREFIX"
                and isinstance(node.value, ast.Constant)
            ),
            "",
        )
        for node in ast.walk(tree):
            if (declared := _declared(node, prefix)) is not None:
                name, labels, text = declared
                if text or name not in found:
                    found[name] = (labels, text)
    return found


def _declared(node: ast.AST, prefix: str) -> tuple[str, tuple[str, ...], str] | None:
    """Name, labels and help, where a call or a tuple declares a metric."""
    if isinstance(node, ast.Call):
        parts = [node.func, *node.args]
        labels = next((word.value for word in node.keywords if word.arg == "labels"), None)
        texts = [word.value for word in node.keywords if word.arg == "documentation"]
        parts[2:2] = texts
    elif isinstance(node, ast.Tuple):
        parts, labels = list(node.elts), None
    else:
        return None
    strings = [(i, text) for i, part in enumerate(parts) if (text := _text(part, prefix))]
    if len(strings) < 2 or strings[1][0] != strings[0][0] + 1:
        return None
    (place, name), (_, text) = strings[:2]
    kind = next((k for k in _KINDS for part in parts[:place] if k in ast.unparse(part).lower()), "")
    if not _METRIC.match(name):
        if not (prefix and kind and re.fullmatch("[a-z0-9_]+", name)):
            return None
        name = prefix + name
    if kind == "counter" and not name.endswith("_total"):
        name += "_total"
    if len(strings) > 2:
        return name, tuple(label for _, label in strings[2:]), text
    if labels is None and len(parts) > place + 2:
        labels = parts[place + 2]
    return name, _labels(labels), text


def _text(node: ast.expr, prefix: str) -> str:
    """A literal text, also behind the module's prefix; else empty."""
    if isinstance(node, ast.BinOp) and ast.unparse(node.left) == "_PREFIX":
        return prefix + _text(node.right, prefix)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return str(node.value) if is_text and isinstance(node, ast.Constant) else ""


def _labels(node: ast.expr | None) -> tuple[str, ...]:
    if isinstance(node, ast.Name) and node.id == "FUNCTION":
        return _FUNCTION_LABELS
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(
            label
            for element in node.elts
            for label in (
                (element.value,)
                if isinstance(element, ast.Constant) and isinstance(element.value, str)
                else _labels(element.value if isinstance(element, ast.Starred) else element)
            )
        )
    return ()


GENERATED: dict[str, Callable[[], str]] = {
    "commands": commands,
    "http": http,
    "settings": settings,
    "metrics": metrics,
}
"""What stands in for `<!-- generated: NAME -->`."""

"""Which external programs the benchmarks' code runs, read from its syntax: nothing is imported or
run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROGRAM = "benchmarks.programs.program"
EXECUTES = re.compile(
    r"subprocess\.(run|Popen|call|check_call|check_output|getoutput|getstatusoutput)"
    r"|asyncio\.create_subprocess_(exec|shell)|os\.(system|popen|exec\w+|spawn\w+|posix_spawnp?)"
)
LAUNCHERS = ("nice",)
"""Programs that run the command which follows their own arguments: that command is checked as
well."""
COMMAND_LINES = ("pilotlight.worker.engine.arguments.command",)
"""Functions of the platform that return a whole command line; their caller passes the program's
path."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def read(root: Path) -> Sources:
    """The package `benchmarks` below `root`."""
    files = {
        ".".join(f.relative_to(root).with_suffix("").parts): f
        for f in sorted((root / "benchmarks").rglob("*.py"))
    }
    return Sources(
        {name.removesuffix(".__init__"): file.read_text() for name, file in files.items()}
    )


@dataclass(frozen=True, slots=True)
class Call:
    """A call, and the functions around it, the innermost last."""

    module: str
    node: ast.Call
    inside: tuple[Function, ...]


class Sources:
    """Modules by dotted name; `definitions` has what they define at their top, by dotted name."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.modules = {name: ast.parse(text) for name, text in texts.items()}
        self.definitions: dict[str, ast.stmt] = {}
        self._names: dict[str, dict[str, str]] = {}
        for module, tree in self.modules.items():
            self._names[module] = dict(_imported(tree))
            for name, statement in _defined(tree):
                self.definitions[f"{module}.{name}"] = statement
                self._names[module][name] = f"{module}.{name}"

    def resolve(self, module: str, expression: ast.expr) -> str:
        """Dotted name of what an expression in `module` refers to; "" where it is no name."""
        if isinstance(expression, ast.Name):
            return self._names[module].get(expression.id, expression.id)
        if isinstance(expression, ast.Attribute):
            owner = self.resolve(module, expression.value)
            return f"{owner}.{expression.attr}" if owner else ""
        return ""

    def programs_of(self, start: str) -> set[str]:
        """Programs that `start` (a dotted name) looks up, itself or in anything that it refers to,
        however far away."""
        seen, todo, found = {start}, [start], set()
        while todo:
            name = todo.pop()
            module = name.rpartition(".")[0]
            for node in ast.walk(self.definitions[name]):
                if isinstance(node, ast.Call) and self.resolve(module, node.func) == PROGRAM:
                    found.add(self._text(module, node.args[0]))
                if (
                    isinstance(node, ast.expr)
                    and (other := self.resolve(module, node)) in self.definitions
                    and other not in seen
                ):
                    seen.add(other)
                    todo.append(other)
        return found

    def calls(self, module: str, function: str) -> bool:
        """Whether `module` calls `function`, a dotted name."""
        return any(
            self.resolve(module, call.node.func) == function
            for call in _calls(module, self.modules[module], ())
        )

    def bare(self) -> list[str]:
        """`module:line: code` of each call that runs a program whose path does not come from
        `program()` (or is this Python)."""
        calls = [call for module, tree in self.modules.items() for call in _calls(module, tree, ())]
        # functions that run a command which their caller passes as first argument
        runners: set[str] = set()
        while True:
            known, offences = len(runners), []
            for call in calls:
                name = self.resolve(call.module, call.node.func)
                if not EXECUTES.fullmatch(name) and name not in runners:
                    continue
                given = {keyword.arg for keyword in call.node.keywords}
                is_found = (
                    bool(call.node.args)
                    and not given & {"shell", "executable"}
                    and self._is_found(call, call.node.args[0], runners)
                )
                if not is_found:
                    offences.append(f"{call.module}:{call.node.lineno}: {ast.unparse(call.node)}")
            if len(runners) == known:
                return offences

    def _is_found(self, call: Call, command: ast.expr, runners: set[str]) -> bool:
        """Whether the first word of a command is found by `program`, or is an interpreter's
        path."""
        match command:
            case ast.List(
                elts=[ast.Call(func=function, args=[ast.Constant(value=launcher)]), *rest]
            ) if launcher in LAUNCHERS:
                launched = [word for word in rest if isinstance(word, ast.Starred)]
                is_looked_up = self.resolve(call.module, function) == PROGRAM
                return (
                    is_looked_up and bool(launched) and self._is_found(call, launched[0], runners)
                )
            case (
                ast.List(elts=[first, *_]) | ast.Tuple(elts=[first, *_]) | ast.Starred(value=first)
            ):
                return self._is_found(call, first, runners)
            case ast.Call(func=function, args=arguments):
                name = self.resolve(call.module, function)
                is_path = (
                    name == "str"
                    and bool(arguments)
                    and not isinstance(arguments[0], ast.Constant | ast.JoinedStr)
                )
                return name in (PROGRAM, *COMMAND_LINES) or is_path
            case ast.Name(id=local):
                return self._is_local_found(call, local, runners)
            case _:
                return self.resolve(call.module, command) == "sys.executable"

    def _is_local_found(self, call: Call, name: str, runners: set[str]) -> bool:
        for function in reversed(call.inside):
            values = [value for target, value in _assigned(function) if target == name]
            if values:
                return all(self._is_found(call, value, runners) for value in values)
            first = function.args.vararg if not function.args.args else function.args.args[0]
            if first is not None and first.arg == name:
                runners.add(f"{call.module}.{function.name}")  # its callers are checked instead
                return True
        return False

    def _text(self, module: str, expression: ast.expr) -> str:
        if isinstance(expression, ast.Constant):
            return str(expression.value)
        constant = self.definitions.get(self.resolve(module, expression))
        if isinstance(constant, ast.Assign) and isinstance(constant.value, ast.Constant):
            return str(constant.value.value)
        raise AssertionError(
            f"{module}: program() takes a literal or a constant, not {ast.unparse(expression)}"
        )


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (
                (alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names
            )
        elif isinstance(node, ast.Import):
            yield from (
                (
                    alias.asname or alias.name.partition(".")[0],
                    alias.name if alias.asname else alias.name.partition(".")[0],
                )
                for alias in node.names
            )


def _defined(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (
                (name.id, statement)
                for target in targets
                for name in ast.walk(target)
                if isinstance(name, ast.Name)
            )


def _assigned(function: Function) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            yield from (
                (target.id, node.value) for target in node.targets if isinstance(target, ast.Name)
            )
        elif (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.value is not None
        ):
            yield node.target.id, node.value


def _calls(module: str, node: ast.AST, inside: tuple[Function, ...]) -> Iterator[Call]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield Call(module, child, inside)
        around = (
            (*inside, child)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            else inside
        )
        yield from _calls(module, child, around)

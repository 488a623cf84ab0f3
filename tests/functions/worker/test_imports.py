"""Packages that are imported before user code: what a worker reports of its imports, and what a
worker without a function does when it becomes one."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec
from tests.fakes.fake_shim import WAIT_S, ShimTimeout, call, function_spec
from tests.fakes.freezing_shim import FreezingShim

SITE = {
    "alpha/__init__.py": "import os, alpha.part\nPID = os.getpid()\nSEEN = os.environ.get('MODE')\n",
    "alpha/part.py": "VALUE = 3\n",
    "alpha/lazy.py": "VALUE = 4\n",
    "beta.py": "import alpha\nimport colorsys\n\ndef work(): return 'beta'\n",
    "gamma.py": "VALUE = 5\n",
    "threads.py": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
    "opener.py": "import socket\nHELD = socket.socket()\n",
    "heavy.py": "import alpha, broad, gamma\nimport heavy_end\nSTATE = alpha.SEEN\n",
    "broad/__init__.py": "import time\ntime.sleep(0.06)\nimport broad.part, beta\n",
    "broad/part.py": "",
    "heavy_end.py": "",
    "broken.py": "raise RuntimeError('not without its device')\n",
}
APP = """
    import pilotlight
    {first}
    import alpha
    {between}
    import beta, alpha.lazy
    app = pilotlight.App("demo")

    @app.function(example=[2])
    def go(n: int) -> list:
        return [n, alpha.SEEN, beta.work(), alpha.lazy.VALUE, beta.alpha is alpha]
"""


def site(directory: Path, files: Mapping[str, str] = SITE) -> Path:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def app(first: str = "", between: str = "") -> dict[str, str]:
    return {"app.py": textwrap.dedent(APP.format(first=first, between=between))}


class ImportShim(FreezingShim):
    """A shim whose worker has packages of its own, and boots as the worker of an environment
    snapshot if `imports` are given; `boot` makes it the function's."""

    def __init__(
        self,
        packages: Path,
        code: Mapping[str, str],
        imports: list[str] | None = None,
        *,
        shape: FunctionSpec | None = None,
    ) -> None:
        self._packages, self._imports, self._launch = packages, imports, dict[str, Any]()
        super().__init__(code, shape or spec())

    def before_boot(self, launch: dict[str, Any]) -> None:
        super().before_boot(launch)
        launch |= {"site": [str(self._packages), *launch["site"]], "records_imports": True}
        self._launch = dict(launch)
        if self._imports is not None:
            launch["entry"] = {"imports": self._imports}
            launch["code"] = str(self.root / "empty")

    def boot(self) -> dict[str, Any]:
        """Restore it into the function's slot; its snapshot point."""
        self.wait_event("snapshot_point")
        self.freeze(in_place=True)
        (self.root / "launch.json").write_text(json.dumps(self._launch))
        self.control.send(json.dumps({"op": "boot", "instance": "", "env": {}}).encode())
        return self.wait_event("snapshot_point")


def spec() -> FunctionSpec:
    return function_spec(qualname="go", methods=[MethodSpec(name="", example=[2])])


def names(point: Mapping[str, Any]) -> list[str]:
    return [name for name, *_ in point["imports"]["modules"]]


ORDER = ["alpha", "beta", "alpha.lazy"]


@pytest.mark.parametrize(
    "first, between, recorded, ended",
    [
        ("", "", ORDER, ""),
        ("import os; os.environ['MODE'] = 'x'", "", [], "the environment variable MODE"),
        ("import sys; sys.path.append('/x')", "", [], "sys.path"),
        ("import random; random.seed(1)", "", [], "random generator"),
        ("", "import textwrap; textwrap.dedent = str", ["alpha"], "changes textwrap.dedent"),
        ("", "import queue; queue.Queue.put = None", ["alpha"], "changes queue.Queue.put"),
        ("", "alpha.PID = 1", ORDER, ""),
        ("", "import signal; signal.signal(10, print)", ["alpha"], "signal handlers"),
        ("", "import threads", ["alpha"], "importing threads starts a thread"),
        ("", "import opener", ["alpha"], "importing opener opens a socket"),
        ("", "try: import broken\n    except RuntimeError: pass", ["alpha"], "broken failed"),
        ("", "try: import nothing\n    except ImportError: pass", ORDER, ""),
        ("", "import helper", ["alpha", "gamma", "beta", "alpha.lazy"], ""),
    ],
)
def test_a_worker_reports_its_imports_until_something_stands_in_the_way(
    tmp_path: Path, first: str, between: str, recorded: list[str], ended: str
) -> None:
    code = {**app(first, between), "helper.py": "import gamma\n"}
    with ImportShim(site(tmp_path), code) as shim:
        point = shim.wait_event("snapshot_point")
    assert names(point) == recorded
    assert ended in point["imports"]["ended"]
    assert bool(ended) == bool(point["imports"]["ended"])
    assert all(ms >= 0 for _, ms, _ in point["imports"]["modules"])


@pytest.mark.parametrize("declared", ["def", "async def"])
def test_imports_in_enter_are_recorded(tmp_path: Path, declared: str) -> None:
    hook = APP.replace("import alpha\n", "\n").replace("import beta, alpha.lazy\n", "\n")
    code = (
        hook.format(first="", between="").partition("    @app.function")[0]
        + f"""
    @app.cls()
    class Service:
        @pilotlight.enter()
        {declared} load(self):
            import alpha, beta, alpha.lazy
            self.value = alpha.lazy.VALUE

        @pilotlight.method(example=[2])
        def go(self, n: int) -> int:
            return n * self.value
    """
    )
    methods = [MethodSpec(name="go", example=[2])]
    shape = function_spec(qualname="Service", kind=FunctionKind.CLASS, methods=methods)
    with ImportShim(site(tmp_path), {"app.py": code}, shape=shape) as shim:
        point = shim.wait_event("snapshot_point")
    assert (names(point), point["imports"]["ended"]) == (ORDER, "")
    with ImportShim(tmp_path, {"app.py": code}, ORDER, shape=shape) as shim:
        assert shim.boot()["answers"] == point["answers"]


def test_a_worker_with_its_packages_imported_ahead_becomes_the_functions(tmp_path: Path) -> None:
    with ImportShim(site(tmp_path), app(), ["alpha", "beta"]) as shim:
        point = shim.boot()
        assert names(point) == ORDER
        assert point["imports"]["ended"] == ""
        assert {"boot", "import", "enter", "warmup"} == set(point["phases_ms"])
        instance = shim.start("i-1")
        assert call(instance, "", [7]) == [7, None, "beta", 4, True]


def test_the_answers_are_those_of_a_worker_that_was_booted_from_nothing(tmp_path: Path) -> None:
    with ImportShim(site(tmp_path), app()) as cold:
        expected = cold.wait_event("snapshot_point")["answers"]
    with ImportShim(tmp_path, app(), ORDER) as shim:
        assert shim.boot()["answers"] == expected != {}
        order = {"op": "prove", "instance": "proof", "env": {}, "answers": expected}
        shim.control.send(json.dumps(order).encode())
        assert shim.wait_event("proved")["ok"] is True


def test_another_answer_than_the_reference_is_told(tmp_path: Path) -> None:
    with ImportShim(site(tmp_path), app()) as shim:
        shim.wait_event("snapshot_point")
        order = {
            "op": "prove",
            "instance": "proof",
            "env": {},
            "answers": {"": ["00" * 16, "list"]},
        }
        shim.control.send(json.dumps(order).encode())
        proved = shim.wait_event("proved")
    assert proved["ok"] is False
    assert "answers its example with [2, None, 'beta', 4, True]" in proved["error"]["message"]


@pytest.mark.parametrize(
    "code, imports, why",
    [
        (app("import gamma"), ["alpha"], "imports gamma before alpha"),
        (app("import beta"), ["alpha", "beta"], "imports beta before alpha"),
        (app("import alpha.lazy"), ["alpha", "beta"], "imports alpha.lazy before beta"),
        (app("import os; os.environ['MODE'] = 'x'"), ["alpha"], "it changes the environment"),
        (app(), [*ORDER, "gamma"], "did not import gamma"),
        ({**app(), "alpha.py": ""}, ["alpha"], "own alpha.py has the name of a module"),
        ({**app(), "colorsys.py": ""}, ["alpha", "beta"], "own colorsys.py has the name"),
    ],
)
def test_code_that_begins_with_other_imports_ends_the_worker(
    tmp_path: Path, code: dict[str, str], imports: list[str], why: str
) -> None:
    with ImportShim(site(tmp_path), code, imports) as shim:
        with pytest.raises(ShimTimeout, match=why):
            shim.boot()
        assert shim.process.wait(WAIT_S) == 1


def test_code_cannot_swallow_that_its_imports_differ(tmp_path: Path) -> None:
    guarded = "try: import gamma\n    except BaseException: pass"
    with (
        ImportShim(site(tmp_path), app(guarded), ["alpha"]) as shim,
        pytest.raises(ShimTimeout, match="imports gamma before alpha"),
    ):
        shim.boot()


@pytest.mark.parametrize(
    "imports, why",
    [
        (["alpha", "threads"], "1: importing threads starts a thread"),
        (["opener"], "0: importing opener opens a socket"),
        (["alpha", "beta", "broken"], "2: importing broken failed"),
        (["nothing"], "0: importing nothing failed"),
        (["alpha; import os"], "0: importing alpha; import os failed"),
        (["alpha", "alpha.part"], "1: alpha.part is loaded already"),
    ],
)
def test_a_module_that_cannot_be_imported_ahead_is_named_with_its_position(
    tmp_path: Path, imports: list[str], why: str
) -> None:
    with (
        ImportShim(site(tmp_path), app(), imports) as shim,
        pytest.raises(ShimTimeout, match=why),
    ):
        shim.wait_event("snapshot_point")


def test_the_proof_imports_everything_once_more(tmp_path: Path) -> None:
    with ImportShim(site(tmp_path), app(), ORDER) as shim:
        shim.wait_event("snapshot_point")
        shim.freeze(in_place=True)
        assert shim.prove()["ok"] is True


# -- an import that user code executes itself

HEAVY = app("import alpha\n    import heavy")
OPENED = ["alpha", "heavy:", "broad"]


def test_a_long_import_is_reported_with_what_it_imports_itself(tmp_path: Path) -> None:
    """Up to the last module that takes long, and none that it has loaded already."""
    with ImportShim(site(tmp_path), HEAVY) as shim:
        modules = shim.wait_event("snapshot_point")["imports"]["modules"]
    assert {name: [part for part, _ in parts] for name, _, parts in modules} == {
        "alpha": [],
        "heavy": ["broad"],
        "alpha.lazy": [],
    }


@pytest.mark.parametrize("imports", [OPENED, [*OPENED, "gamma"], [*OPENED, "gamma", "heavy_end"]])
def test_an_opened_import_runs_in_the_function_with_its_own_imports_made_ahead(
    tmp_path: Path, imports: list[str]
) -> None:
    with ImportShim(site(tmp_path), HEAVY, imports) as shim:
        point = shim.boot()
        assert names(point) == ["alpha", "heavy", "alpha.lazy"]
        assert call(shim.start("i-1"), "", [7]) == [7, None, "beta", 4, True]
    with ImportShim(tmp_path, HEAVY, imports) as shim:
        shim.wait_event("snapshot_point")
        shim.freeze(in_place=True)
        assert shim.prove()["ok"] is True


@pytest.mark.parametrize(
    "code, imports, why",
    [
        (app("import alpha\n    import broad"), OPENED, "1: it imports broad before broad"),
        (app("import alpha\n    import gamma"), OPENED, "1: it imports gamma before broad"),
        (app(), OPENED, "1: it imports beta before broad"),
        (app("import heavy"), OPENED, "0: it imports heavy before alpha"),
        (HEAVY, ["alpha", "heavy:", "gamma"], "1: heavy imports broad before gamma"),
        (HEAVY, [*OPENED, "opener"], "2: heavy imports gamma before opener"),
        (HEAVY, ["alpha", "heavy:", "broad", "gamma", "heavy_end", "broken.x"], "broken.x failed"),
    ],
)
def test_code_that_does_not_open_it_so_ends_the_worker(
    tmp_path: Path, code: dict[str, str], imports: list[str], why: str
) -> None:
    packages = site(tmp_path, {**SITE, "opener.py": ""})
    with ImportShim(packages, code, imports) as shim, pytest.raises(ShimTimeout, match=why):
        shim.boot()

"""Large packages are imported by a deploy only if the app uses them while it is loaded."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.packaging.app_loader import load_app, load_module

APP = """
import pilotlight
{imports}
app = pilotlight.App("lazy")

@app.function()
def go(n: int) -> int:
    return vllm.twice(n)
"""
PACKAGE = "VALUE = 3\ndef twice(n):\n    return 2 * n\n"


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loads a module with these lines; returns it and whether the package was imported then."""
    packages, code = tmp_path / "site-packages", tmp_path / "code"
    for directory, name in ((packages, "vllm"), (packages / "vllm", "parts")):
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text(PACKAGE)
    code.mkdir()
    monkeypatch.syspath_prepend(str(packages))
    known = set(sys.modules)

    def load(imports: str) -> tuple[Any, bool]:
        (code / "lazy_app.py").write_text(APP.format(imports=imports))
        return load_module(str(code / "lazy_app.py")), "vllm" in sys.modules

    yield load
    for name in sys.modules.keys() - known:
        if name.partition(".")[0] in ("vllm", "lazy_app"):
            del sys.modules[name]


def test_a_package_that_only_functions_use_is_not_imported(imported: Any) -> None:
    module, was_imported = imported("import vllm")
    assert not was_imported
    assert module.app.declarations["go"].raw(4) == 8
    sys.modules["vllm"].VALUE = 5  # type: ignore[attr-defined]
    assert module.vllm.VALUE == 5
    module.vllm.VALUE = 6
    assert sys.modules["vllm"].VALUE == 6
    assert "twice" in dir(module.vllm)
    assert pickle.loads(pickle.dumps(module.vllm)) is sys.modules["vllm"]


@pytest.mark.parametrize(
    "imports",
    [
        "import vllm\nvllm.VALUE",
        "import vllm\ndef other(value: vllm.VALUE): pass",
        "from vllm import VALUE",
        "import vllm.parts",
    ],
)
def test_one_that_is_used_while_the_app_is_loaded_is_imported(imported: Any, imports: str) -> None:
    assert imported(imports)[1]


def test_one_that_is_not_installed_is_an_import_error_as_always(tmp_path: Path) -> None:
    file = tmp_path / "lacking.py"
    file.write_text("try:\n    import diffusers\nexcept ImportError:\n    diffusers = None\n")
    assert load_module(str(file)).diffusers is None
    del sys.modules["lacking"]


def test_only_the_apps_own_imports_are_deferred(imported: Any, tmp_path: Path) -> None:
    """A package imports another one at once, and so does code that runs later."""
    (tmp_path / "site-packages/uses_vllm.py").write_text("import vllm\n")
    try:
        assert imported("import uses_vllm, vllm")[1]
    finally:
        sys.modules.pop("uses_vllm", None)


def test_the_app_is_found_and_no_module_is_imported_for_it(imported: Any, tmp_path: Path) -> None:
    imported("import vllm")
    assert load_app(str(tmp_path / "code/lazy_app.py")).name == "lazy"
    assert "vllm" not in sys.modules

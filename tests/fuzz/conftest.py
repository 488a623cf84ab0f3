"""The fuzzer of this run, and what it says about it."""

from __future__ import annotations

import pytest

from tests.fuzz.fuzzing import Fuzzer, corpus


@pytest.fixture(scope="session")
def fuzzer(request: pytest.FixtureRequest) -> Fuzzer:
    """Time and seed from the command line."""
    return Fuzzer(
        request.config.getoption("--fuzz-seconds"), request.config.getoption("--fuzz-seed")
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A target runs as long as was asked for, and as long as it takes to shrink what fails."""
    seconds = config.getoption("--fuzz-seconds")
    if seconds is not None:
        for item in items:
            if "fuzzer" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.timeout(seconds + 300))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`seed_of_<target>`: each file of the corpus of that target."""
    for name in metafunc.fixturenames:
        if name.startswith("seed_of_"):
            files = corpus(name.removeprefix("seed_of_"))
            metafunc.parametrize(
                name, [file.read_bytes() for file in files], ids=[file.name for file in files]
            )

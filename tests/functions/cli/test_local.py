"""Which platform is meant, what `up` writes, and the lock that says whether it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pilotlight.cli.supervisor.local_platform import (
    HomeLock,
    LocalPlatform,
    configure,
    find_platform,
    find_running,
    refuse_running,
    with_active_config,
)
from pilotlight.errors import Conflict, InvalidInput


@pytest.fixture
def here(short_tmp: Path) -> Path:
    return short_tmp


def meant(
    here: Path, *, config: Path | None = None, home: Path | None = None, **environ: str
) -> LocalPlatform:
    return find_platform(config=config, home=home, environ={"HOME": str(here), **environ}, cwd=here)


def test_without_anything_every_default_holds(here: Path) -> None:
    platform = meant(here)
    assert platform.paths.home == here / ".local/share/pilotlight"
    assert platform.url == "http://127.0.0.1:8700"


def test_a_named_file_beats_the_variable_which_beats_the_directory(here: Path) -> None:
    for name in ("a", "b", "platform"):
        (here / f"{name}.yaml").write_text(f"activator: {{listen: '{name}:1'}}")
    assert meant(here).listen == "platform:1"
    assert meant(here, PILOTLIGHT_PLATFORM=str(here / "b.yaml")).listen == "b:1"
    assert (
        meant(here, config=here / "a.yaml", PILOTLIGHT_PLATFORM=str(here / "b.yaml")).listen
        == "a:1"
    )


def test_a_home_brings_its_own_file(here: Path) -> None:
    (here / "platform.yaml").write_text("activator: {listen: 'near:1'}")
    (here / "h").mkdir()
    (here / "h/platform.yaml").write_text("activator: {listen: 'own:1'}")
    assert meant(here, home=here / "h").listen == "own:1"


def test_a_flag_beats_the_variable_which_beats_the_directory_which_beats_the_default_home(
    here: Path,
) -> None:
    files = {name: here / name / "platform.yaml" for name in ("flag", "variable", "default", "h")}
    for name, file in {**files, "near": here / "platform.yaml"}.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"activator: {{listen: '{name}:1'}}")

    def found(
        variable: bool = False, config: Path | None = None, home: Path | None = None
    ) -> LocalPlatform:
        named = {"PILOTLIGHT_PLATFORM": str(files["variable"])} if variable else {}
        environ = {"PILOTLIGHT_HOME": str(here / "default"), **named}
        return find_platform(config=config, home=home, environ=environ, cwd=here)

    assert found(True, config=files["flag"], home=here / "h").listen == "flag:1"
    assert found(True, home=here / "h").listen == "h:1"
    assert found(True, home=here / "empty").listen == "variable:1"
    assert found(True).listen == "variable:1"
    near = found()
    assert (near.listen, near.paths.home) == ("near:1", here / "default")
    assert near.config_summary == (
        f"configuration: {here}/platform.yaml ({here}/default/platform.yaml is not read)"
    )
    (here / "platform.yaml").unlink()
    assert found().config_summary == f"configuration: {files['default']}"
    files["default"].unlink()
    assert "defaults" in found().config_summary


def test_a_missing_or_broken_file_is_named(here: Path) -> None:
    with pytest.raises(InvalidInput, match="no configuration file"):
        meant(here, config=here / "gone.yaml")
    (here / "bad.yaml").write_text("platform: {trust: maybe}")
    with pytest.raises(InvalidInput, match=r"bad\.yaml:1.*trust"):
        meant(here, config=here / "bad.yaml")


@pytest.mark.parametrize(
    "listen, url",
    [
        ("0.0.0.0:80", "http://127.0.0.1:80"),
        ("[::]:80", "http://[::1]:80"),
        ("box:8", "http://box:8"),
    ],
)
def test_the_url_is_one_that_can_be_called_from_here(here: Path, listen: str, url: str) -> None:
    (here / "p.yaml").write_text(yaml.safe_dump({"activator": {"listen": listen}}))
    assert meant(here, config=here / "p.yaml").url == url


def test_overrides_are_written_to_the_home_and_other_settings_kept(here: Path) -> None:
    (here / "p.yaml").write_text("activator: {max_queued: 5}\ncontroller: {invoice_after_days: 9}")
    platform = configure(
        meant(here, config=here / "p.yaml", home=here / "h"),
        listen="127.0.0.1:9000",
        home=here / "h",
    )
    written = yaml.safe_load((here / "h/platform.yaml").read_text())
    assert written["activator"] == {"max_queued": 5, "listen": "127.0.0.1:9000"}
    assert written["controller"] == {"invoice_after_days": 9}
    assert written["platform"]["home"] == str(here / "h")
    assert platform.config == here / "h/platform.yaml"
    assert meant(here, config=here / "h/platform.yaml").paths == platform.paths


def test_defaults_are_not_written_to_the_home(here: Path) -> None:
    """What the repository's own file lists are the defaults: a later release may change them."""
    listed = (Path(__file__).parents[3] / "platform.yaml").read_text()
    (here / "platform.yaml").write_text(listed.replace("max_queued: ", "max_queued: 1"))
    configure(meant(here, home=here / "h"), listen="127.0.0.1:9000", home=here / "h")
    written = yaml.safe_load((here / "h/platform.yaml").read_text())
    assert written.pop("platform") == {"home": str(here / "h")}
    assert written["activator"].pop("max_queued") > 10_000
    assert written == {"activator": {"listen": "127.0.0.1:9000"}}


def test_changed_plans_and_prices_are_kept(here: Path) -> None:
    (here / "platform.yaml").write_text(
        "plans: {free: {}, mine: {requests_per_s: 5}}\nprices: {version: '2027-01'}\n"
    )
    configure(meant(here, home=here / "h"), listen=None, home=here / "h")
    written = yaml.safe_load((here / "h/platform.yaml").read_text())
    assert written["plans"] == {"mine": {"requests_per_s": 5}}
    assert written["prices"] == {"version": "2027-01"}


def test_another_port_opens_no_further_ones(here: Path) -> None:
    platform = configure(meant(here, home=here / "h"), listen="127.0.0.1:9000", home=here / "h")
    assert "metrics_listen" not in platform.config.read_text()


def test_the_configuration_in_force_is_that_of_the_running_supervisor(here: Path) -> None:
    (here / "own.yaml").write_text("activator: {listen: 'own:1'}")
    platform = meant(here, config=here / "own.yaml", home=here / "h")
    platform.paths.make()
    lock = HomeLock(platform)
    lock.acquire()
    try:
        found = with_active_config(meant(here, home=here / "h"))
    finally:
        lock.release()
    assert (found.config, found.listen) == (here / "own.yaml", "own:1")


@pytest.mark.parametrize("listen", ["8700", ":8700", "host:", "host:0", "host:99999", "host:http"])
def test_an_address_that_is_none_is_refused(here: Path, listen: str) -> None:
    with pytest.raises(InvalidInput, match="is not an address"):
        configure(meant(here, home=here / "h"), listen=listen, home=None)


def test_a_home_is_locked_by_one_supervisor_and_free_after_it(here: Path) -> None:
    platform = meant(here, home=here / "h")
    platform.paths.make()
    assert find_running(platform) is None
    first = HomeLock(platform)
    first.acquire()
    found = find_running(platform)
    assert found is not None
    assert found.url == platform.url
    conflict = rf"already runs in {platform.paths.home} \(process {found.pid}"
    with pytest.raises(Conflict, match=conflict):
        HomeLock(platform).acquire()
    with pytest.raises(Conflict, match=conflict):
        refuse_running(platform)
    first.release()
    assert find_running(platform) is None
    refuse_running(platform)

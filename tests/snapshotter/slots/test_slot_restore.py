"""A worker's way through real CRIU: stand still, be dumped, come back in another slot."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from snapshotter.criu import operations
from snapshotter.criu.lazy import LazyPages, PageRequest
from snapshotter.slots import slot as slots
from snapshotter.slots import sockets
from snapshotter.slots.replies import BootFailed, CheckpointFailed
from tests.fakes.agent_home import MIB
from tests.fakes.slot_workshop import PATIENCE_S, Image, Place, Workshop

pytestmark = pytest.mark.root
ALLOCATED_BYTES = 64 * MIB


def status(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/status").read_text()
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def processes(place: Place) -> list[Path]:
    """The processes in a slot's PID namespace, zombies included, but for its shim."""
    mine = os.readlink(f"/proc/{place.slot.shim_pid}/ns/pid")
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdecimal()
                and int(entry.name) != place.slot.shim_pid
                and os.readlink(entry / "ns/pid") == mine
            ):
                found.append(entry)
    return found


def inside(place: Place) -> list[str]:
    """Their names."""
    names = []
    for entry in processes(place):
        with contextlib.suppress(OSError):
            names.append((entry / "comm").read_text().strip())
    return names


def resident_bytes(place: Place) -> int:
    """Memory of the largest of them."""
    pages = [int((entry / "statm").read_text().split()[1]) for entry in processes(place)]
    return max(pages) * resource.getpagesize()


async def test_a_fork_of_a_template_comes_back_in_another_slot_and_serves(shop: Workshop) -> None:
    template = await shop.boot(boot=["remember:warm"])
    place = await shop.restore(await shop.dump(template))
    running = await shop.start(place, in_place=True, env={"TOKEN": "t"})

    assert place.slot.worker == "serving"
    assert place.slot.point.result() == template.slot.point.result()
    assert await shop.ask(place, running, "/memory") == ["warm"]
    assert await shop.ask(place, running, "/env/TOKEN") == "t"


async def test_forks_that_run_notice_nothing_and_are_not_in_the_image(shop: Workshop) -> None:
    template = await shop.boot(boot=["remember:warm"])
    sibling = await shop.start(template)
    await shop.ask(template, sibling, "/remember/said-" + "d00d42")
    image = await shop.dump(template)

    assert image.holds(b"warm")
    assert not image.holds(b"said-d00d42")
    assert await shop.ask(template, sibling, "/memory") == ["warm", "said-d00d42"]
    again = await shop.start(template)
    assert await shop.ask(template, again, "/memory") == ["warm"]


async def test_a_restored_process_is_confined_and_known_by_its_slot(shop: Workshop) -> None:
    place = await shop.restore(await shop.dump(await shop.boot()))
    running = await shop.start(place, in_place=True)

    said = status(place.slot.worker_pid)
    assert said["Uid"].split() == ["20001"] * 4
    assert (said["CapEff"].strip("0"), said["NoNewPrivs"], said["Seccomp"]) == ("", "1", "2")
    assert int(said["PPid"]) == place.slot.shim_pid
    assert await shop.ask(place, running, "/hostname") == place.slot.id
    assert set((await shop.ask(place, running, "/syscalls")).values()) == {1, 38}  # EPERM, ENOSYS


async def test_a_restored_worker_is_a_template_like_any_other(shop: Workshop) -> None:
    place = await shop.restore(await shop.dump(await shop.boot(boot=["remember:warm"])))
    first, second = await shop.start(place), await shop.start(place)
    await shop.ask(place, first, "/remember/mine")

    assert await shop.ask(place, first, "/memory") == ["warm", "mine"]
    assert await shop.ask(place, second, "/memory") == ["warm"]
    again = await shop.restore(await shop.dump(place))
    assert await shop.ask(again, await shop.start(again, in_place=True), "/memory") == ["warm"]


@pytest.mark.parametrize("count", [2, 8])
async def test_clones_of_one_image_run_at_once(shop: Workshop, count: int) -> None:
    image = await shop.dump(await shop.boot(boot=["remember:warm"]))
    places = await asyncio.gather(*(shop.restore(image) for _ in range(count)))
    runnings = [await shop.start(place, in_place=True) for place in places]

    assert {await shop.ask(p, r, "/hostname") for p, r in zip(places, runnings, strict=True)} == {
        p.slot.id for p in places
    }
    assert all(
        [await shop.ask(p, r, "/memory") == ["warm"] for p, r in zip(places, runnings, strict=True)]
    )


async def test_what_a_restored_instance_prints_is_logged(shop: Workshop) -> None:
    place = await shop.restore(await shop.dump(await shop.boot()))
    running = await shop.start(place, in_place=True)
    await shop.ask(place, running, "/print/hello")
    await shop.stop(running, place.slot)

    assert "stdout call-1 hello" in shop.log(place, running.id)


async def test_memory_that_comes_when_it_is_touched(shop: Workshop) -> None:
    image = await shop.dump(await shop.boot(boot=[f"allocate:{16 * MIB}", "remember:warm"]))
    place = await shop.restore(image, lazy=True)
    running = await shop.start(place, in_place=True)

    assert await shop.ask(place, running, "/hoard") == 16 * MIB
    assert await shop.ask(place, running, "/memory") == ["warm"]


async def test_files_written_before_the_snapshot_point_travel_and_later_ones_do_not(
    shop: Workshop,
) -> None:
    boot = ["write:kept.txt=early", "write:/tmp/kept.txt=temporary", "write:/dev/shm/kept=shared"]
    template = await shop.boot(boot=boot, wake=["booted:write:late.txt=late"])
    await shop.start(template)
    image = await shop.dump(template)
    place = await shop.restore(image)
    running = await shop.start(place, in_place=True)

    assert await shop.ask(place, running, "/read/run/pilotlight/slot/work/kept.txt") == "early"
    assert await shop.ask(place, running, "/read/tmp/kept.txt") == "temporary"
    assert await shop.ask(place, running, "/read/dev/shm/kept") == "shared"
    work = "run/pilotlight/slot/work"
    assert sorted(
        p.name for p in Path(f"/proc/{template.slot.worker_pid}/root/{work}").iterdir()
    ) == ["kept.txt", "late.txt"]
    assert [p.name for p in Path(f"/proc/{place.slot.worker_pid}/root/{work}").iterdir()] == [
        "kept.txt"
    ]


@pytest.mark.parametrize("path", ["gone.txt", "/tmp/gone.txt", "/dev/shm/gone"])
async def test_a_file_that_is_open_and_has_no_name_travels_to_every_clone(
    shop: Workshop, path: str
) -> None:
    image = await shop.dump(await shop.boot(boot=[f"unlinked:{path}"]))
    for _ in range(2):
        place = await shop.restore(image)
        running = await shop.start(place, in_place=True)
        assert await shop.ask(place, running, "/opened") == [path]


async def test_a_whole_tree_with_threads_and_helpers_comes_back(shop: Workshop) -> None:
    worker = await shop.boot(
        boot=["thread", "helper", "remember:warm", "print:booted", "write:log.txt=x"]
    )
    assert worker.slot.point.result().threads == ("surplus", "process cat")
    image = await shop.dump(worker, in_place=True)
    assert worker.slot.worker in ("frozen", "dead")

    places = await asyncio.gather(shop.restore(image), shop.restore(image))
    for place in places:
        running = await shop.start(place, in_place=True)
        assert await shop.ask(place, running, "/threads") == ["surplus"]
        assert await shop.ask(place, running, "/helper/echo") == "echo"
        assert await shop.ask(place, running, "/memory") == ["warm"]
        assert await shop.ask(place, running, "/read/run/pilotlight/slot/work/log.txt") == "x"
        assert "cat" in inside(place)


async def test_what_a_restored_tree_prints_before_it_serves_is_in_the_slots_log(
    shop: Workshop,
) -> None:
    worker = await shop.boot(boot=["thread", "print:booted"])
    image = await shop.dump(worker, in_place=True)
    place = await shop.restore(image)
    assert set(image.quiesced.stdio or {}) == {"stdout", "stderr"}
    running = await shop.start(place, in_place=True)
    await shop.ask(place, running, "/print/served")
    await shop.stop(running, place.slot)

    assert "booted" in shop.log(worker)
    assert "served" in shop.log(place, running.id)


async def test_a_proof_is_the_workers_word_and_it_leaves_after_it(shop: Workshop) -> None:
    place = await shop.restore(await shop.dump(await shop.boot()))
    proved = await place.slot.check_examples(PATIENCE_S)
    assert (proved.ok, proved.error, proved.phases_ms) == (True, None, {"first_answer": 1.0})
    while place.slot.worker != "dead":
        await asyncio.sleep(0.005)
    assert place.witness.said == [("worker_gone", 0)]

    wrong = await shop.restore(await shop.dump(await shop.boot(boot=["wrong"])))
    proved = await wrong.slot.check_examples(PATIENCE_S)
    assert (proved.ok, (proved.error or {})["message"]) == (False, "another answer")


# -- what stands in the way


@pytest.mark.parametrize("in_place", [False, True])
async def test_an_obstacle_is_named_and_the_worker_goes_on(shop: Workshop, in_place: bool) -> None:
    template = await shop.boot(boot=["refuse:TCP to 10.0.0.2:443"])
    for name in ("c-1", "c-2"):
        quiesced = await shop.quiesce(template, in_place=in_place, name=name)
        assert [o["what"] for o in quiesced.obstacles] == ["TCP to 10.0.0.2:443"]
    assert await shop.ask(template, await shop.start(template), "/memory") == []


async def test_one_checkpoint_at_a_time_and_one_that_nobody_wants_is_ended(shop: Workshop) -> None:
    template = await shop.boot()
    await shop.quiesce(template)
    with pytest.raises(CheckpointFailed, match="c-1 is in progress"):
        await shop.quiesce(template, name="c-2")
    template.slot.end_checkpoint("c-1")
    await shop.quiesce(template, name="c-3")
    template.slot.end_checkpoint("c-3")
    while len(inside(template)) > 1:
        await asyncio.sleep(0.005)


async def test_a_template_that_dies_while_it_is_asked_is_a_failed_checkpoint(
    shop: Workshop,
) -> None:
    template = await shop.boot(entry={"boot": [], "wake": [], "freeze": "hang"})
    asked = asyncio.create_task(shop.quiesce(template, in_place=True))
    await asyncio.sleep(0.05)
    template.slot.kill_worker()
    with pytest.raises(CheckpointFailed, match="before it was quiesced"):
        await asked


@pytest.mark.parametrize("in_place", [False, True])
async def test_a_dump_begins_after_the_process_has_closed_the_platforms_channel(
    shop: Workshop, in_place: bool
) -> None:
    template = await shop.boot(entry={"boot": ["remember:warm"], "wake": [], "freeze": "late"})
    place = await shop.restore(await shop.dump(template, in_place=in_place))
    assert await shop.ask(place, await shop.start(place, in_place=True), "/memory") == ["warm"]


async def test_too_many_bytes_in_the_work_directory_are_an_obstacle_that_names_the_file(
    shop: Workshop,
) -> None:
    template = await shop.boot(boot=["write:/tmp/big.bin=" + "x" * 1000, "grow:/tmp/big.bin=70"])
    [obstacle] = template.slot.point.result().obstacles
    assert obstacle["kind"] == "file"
    assert "64 MiB, the biggest is /run/pilotlight/slot/tmp/big.bin" in obstacle["message"]


async def test_a_slot_that_is_in_use_cannot_be_furnished_and_an_empty_one_not_revived(
    shop: Workshop,
) -> None:
    template = await shop.boot()
    null = os.open(os.devnull, os.O_RDONLY)
    with pytest.raises(BootFailed, match="it is resident"):
        await template.slot.prepare_restore(
            {"binds": [], "uid": None, "writable_bytes": MIB}, null, null
        )
    os.close(null)
    place, _ = await shop.take(shop.home.launch())
    with pytest.raises(BootFailed, match="that is empty"):
        await place.slot.resume(7, {"threads": [], "phases_ms": {}}, PATIENCE_S)


async def test_only_a_child_of_the_shim_is_revived_and_nothing_is_left_when_it_fails(
    shop: Workshop,
) -> None:
    place = await shop.prepare_restore(await shop.dump(await shop.boot()))
    with pytest.raises(BootFailed, match="process 1 is not a child"):
        await place.slot.resume(1, {"threads": [], "phases_ms": {}}, PATIENCE_S)
    assert inside(place) == []


# -- the slot itself


async def test_the_hosts_run_and_tmp_are_out_of_sight(shop: Workshop) -> None:
    Path("/run/pilotlight-canary").write_text("host")
    try:
        template = await shop.boot()
        seen = Path(f"/proc/{template.slot.worker_pid}/root/run")
        assert sorted(p.name for p in seen.iterdir()) == ["lock", "pilotlight"]
        assert [p.name for p in (seen / "pilotlight").iterdir()] == ["slot"]
        assert int(status(template.slot.worker_pid)["NSpid"].split()[-1]) > 1000
        names = await shop.ask(template, await shop.start(template), "/read/etc/resolv.conf")
        assert names == Path("/etc/resolv.conf").read_text()
    finally:
        Path("/run/pilotlight-canary").unlink()


async def test_another_agent_adopts_a_restored_slot(shop: Workshop) -> None:
    image = await shop.dump(await shop.boot(boot=["remember:warm"]))
    place = await shop.restore(image)
    running = await shop.start(place)
    place.slot.close()

    connection = sockets.connect(place.slot.directory / "shim.sock")
    adopted = slots.Slot(place.slot.id, place.slot.directory, connection, -1)
    await adopted.adopt()
    assert (adopted.worker, adopted.worker_pid) == ("resident", place.slot.worker_pid)
    assert adopted.point.result() == place.slot.point.result()
    assert adopted.running[running.id].pid == running.pid
    place.slot, adopted.owner = adopted, place.witness
    assert await shop.ask(place, await shop.start(place), "/memory") == ["warm"]


@pytest.mark.parametrize("lazy", [False, True])
async def test_a_restored_instance_lives_on_without_an_agent(shop: Workshop, lazy: bool) -> None:
    place = await shop.restore(
        await shop.dump(await shop.boot(boot=[f"allocate:{16 * MIB}"])), lazy=lazy
    )
    running = await shop.start(place, in_place=True)
    place.slot.close()
    assert await shop.ask(place, running, "/hoard") == 16 * MIB
    place.slot = await adopt(place)


async def waiting_for_pages(
    shop: Workshop, image: Image
) -> tuple[Place, operations.Restored, LazyPages]:
    """Restored and not revived, with memory missing."""
    place = await shop.prepare_restore(image)
    with shop.opened(image.directory, place) as (images, work):
        restored = await operations.restore(
            place.slot,
            criu=shop.criu,
            images=images,
            work=work,
            uid=place.uid,
            cgroup=place.group.entry_files(),
            lazy=PageRequest(record=True),  # only what it touches is brought
            deadline_s=PATIENCE_S,
        )
    assert restored.lazy is not None
    assert resident_bytes(place) < ALLOCATED_BYTES
    return place, restored, restored.lazy


@pytest.mark.parametrize("agent", ["gone", "restarted"])
async def test_a_restored_worker_whose_page_server_dies_ends_whoever_listens(
    shop: Workshop, agent: str
) -> None:
    image = await shop.dump(await shop.boot(boot=[f"allocate:{ALLOCATED_BYTES}"]))
    place, restored, server = await waiting_for_pages(shop, image)
    await place.slot.resume(restored.pid, image.point, PATIENCE_S)
    worker = place.slot.worker_pid
    place.slot.close()
    if agent == "restarted":
        place.slot = await adopt(place)
        assert place.slot.worker == "resident"

    os.kill(worker, signal.SIGSTOP)  # or it would touch missing memory, and die of that
    signal.pidfd_send_signal(server.run.pidfd, signal.SIGKILL)

    while Path(f"/proc/{worker}").exists():
        await asyncio.sleep(0.005)
    if agent == "gone":
        place.slot = await adopt(place)
    while place.slot.worker != "dead":
        await asyncio.sleep(0.005)
    os.close(server.run.pidfd)


async def test_a_process_whose_page_server_died_is_not_revived(shop: Workshop) -> None:
    image = await shop.dump(await shop.boot(boot=[f"allocate:{ALLOCATED_BYTES}"]))
    place, restored, server = await waiting_for_pages(shop, image)
    await server.kill()

    with pytest.raises(BootFailed, match="page server"):
        await place.slot.resume(restored.pid, image.point, PATIENCE_S)


async def test_without_its_agent_what_stood_still_and_what_was_half_restored_goes(
    shop: Workshop,
) -> None:
    template = await shop.boot()
    image = await shop.dump(template)
    half = await shop.prepare_restore(image)
    await shop.quiesce(template, name="c-2")
    for place in (template, half):
        place.slot.close()
        place.slot = await adopt(place)

    assert (template.slot.worker, half.slot.worker) == ("resident", "dead")
    assert inside(half) == []
    while len(inside(template)) > 1:
        await asyncio.sleep(0.005)


async def adopt(place: Place) -> slots.Slot:
    slot = slots.Slot(
        place.slot.id, place.slot.directory, sockets.connect(place.slot.directory / "shim.sock"), -1
    )
    await slot.adopt()
    return slot


@pytest.mark.parametrize("state", ["booted", "still", "furnished", "restored", "serving"])
async def test_a_shim_that_is_killed_takes_everything_with_it(shop: Workshop, state: str) -> None:
    place = await shop.boot()
    if state == "still":
        await shop.quiesce(place)
    elif state != "booted":
        image = await shop.dump(place)
        place = await (shop.prepare_restore(image) if state == "furnished" else shop.restore(image))
    running: Any = await shop.start(place, in_place=True) if state == "serving" else None
    before = [place.slot.worker_pid, place.slot.shim_pid]

    os.kill(place.slot.shim_pid, signal.SIGKILL)

    while not place.slot.is_lost:
        await asyncio.sleep(0.005)
    if running is not None:
        assert running.exited.result().status is None
    assert ("slot_gone", place.slot.id) in place.witness.said
    while any(pid and Path(f"/proc/{pid}").exists() for pid in before):
        await asyncio.sleep(0.005)

"""The agent as a whole, in this event loop, against real slots with the small worker: COLD, FORK,
failures, ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.client import AgentClient
from snapshotter.errors import (
    InstanceUnknown,
    LeaseHeld,
    NoCapacity,
    StartFailed,
    StartStopped,
    StartTimeout,
    Unsupported,
)
from snapshotter.images.code_bundles import Bundles
from snapshotter.linux.cgroups import Cgroups
from snapshotter.types import (
    AgentEvent,
    InstanceState,
    RevisionKey,
    StartKind,
    TenantShare,
    WeightsMount,
)
from tests.fakes.agent_home import MIB, AgentHome, ask, begin, instance_id, settled_descriptors
from tests.fakes.bundle import pack
from tests.fakes.waiting import until


async def next_event(
    client: AgentClient, kind: str, watching: asyncio.Event | None = None
) -> AgentEvent:
    async for event in client.watch():
        if event.kind == kind:
            return event
    raise AssertionError("the stream ended")


async def watching(client: AgentClient, kind: str) -> asyncio.Task[AgentEvent]:
    """A task that waits for the next event of `kind`, already subscribed: frames of one connection
    are served in order."""
    task = asyncio.create_task(next_event(client, kind))
    await asyncio.sleep(0)
    await client.templates()
    return task


def sockets(home: AgentHome) -> list[str]:
    found = []
    for slot in (home.paths.run / "slots").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a slot that just goes
            found += [
                p.name for p in slot.iterdir() if p.name.startswith("i-") and p.suffix == ".sock"
            ]
    return sorted(found)


async def test_the_first_start_is_cold_and_the_next_one_forks(
    home: AgentHome, client: AgentClient
) -> None:
    cold = await begin(client, home.launch())
    fork = await begin(client, home.launch())

    assert (cold.start_kind, fork.start_kind) == (StartKind.COLD, StartKind.FORK)
    # a busy machine's boots wait
    assert [p for p in cold.phases_ms if p != "queue"] == ["slot", "boot", "enter", "fork", "wake"]
    assert list(fork.phases_ms) == ["fork", "wake"]
    assert cold.state is InstanceState.READY
    assert cold.pid != fork.pid
    [template] = await client.templates()
    assert (template.revision, template.forks, template.threads) == ("f-1@v1-abc", 2, ())
    assert template.pss_bytes > 0


async def test_an_instance_gets_its_environment_and_only_a_clean_one(
    home: AgentHome, client: AgentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_ONLY", "leaked")
    info = await begin(client, home.launch(env={"MODE": "fast"}), secret_env={"TOKEN": "s3cret"})

    assert await ask(info, "/env/MODE") == "fast"
    assert await ask(info, "/env/TOKEN") == "s3cret"
    assert await ask(info, "/env/AGENT_ONLY") is None
    assert await ask(info, "/env/OMP_NUM_THREADS") == "1"


async def test_a_bundle_stays_while_a_slot_has_it(home: AgentHome) -> None:
    now = 0.0
    idle = pack(home.paths.home, {"app.py": b"x = 2"})
    home.bundles = Bundles(home.paths.home, kept_bytes=0, clock=lambda: now)
    async with home.agent(), home.client() as client:
        await begin(client, home.launch())
        await home.bundles.ensure(idle)
        now = 100.0
        assert await home.bundles.make_room() == 1
        assert [code.name for code in (home.paths.home / "node" / "code").iterdir()] == [
            home.bundle
        ]


async def test_bundles_and_logs_of_builds_that_nothing_needs_go_while_the_agent_runs(
    home: AgentHome,
) -> None:
    idle = await Bundles(home.paths.home).ensure(pack(home.paths.home, {"app.py": b"x = 2"}))
    home.bundles = Bundles(home.paths.home, kept_bytes=0)
    log = home.paths.home / "node" / "images" / f"{1:064x}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    os.utime(log, (1, 1))
    async with home.agent(), asyncio.timeout(40):
        while idle.exists() or log.exists():
            await asyncio.sleep(0.01)


async def test_many_starts_at_once_share_one_boot(home: AgentHome, client: AgentClient) -> None:
    infos = await asyncio.gather(*(begin(client, home.launch()) for _ in range(12)))

    assert len({i.pid for i in infos}) == 12
    assert {i.start_kind for i in infos} == {StartKind.COLD}
    assert len(await client.templates()) == 1
    assert len(set(await asyncio.gather(*(ask(i, "/") for i in infos)))) == 12


async def test_the_same_id_is_the_same_start(home: AgentHome, client: AgentClient) -> None:
    name = instance_id()
    first, second = await asyncio.gather(
        *(begin(client, home.launch(), instance_id=name) for _ in range(2))
    )

    assert first == second == await begin(client, home.launch(), instance_id=name)
    with pytest.raises(LeaseHeld) as e:
        await begin(client, home.launch(), instance_id=name, lessee="act-2")
    assert e.value.detail["lessee"] == "act-1"


async def test_what_user_code_raises_at_boot_fails_the_start_with_error_and_lines(
    home: AgentHome, client: AgentClient
) -> None:
    with pytest.raises(StartFailed, match="RuntimeError: no model") as e:
        await begin(client, home.launch(boot=["print:loading", "raise:no model"]))

    assert e.value.detail["error"]["type"] == "RuntimeError"
    assert e.value.detail["error"]["phase"] == "enter"
    assert e.value.detail["log_tail"] == ["loading"]
    assert await client.instances() == []


async def test_what_user_code_raises_after_the_fork_fails_that_start_only(
    home: AgentHome, client: AgentClient
) -> None:
    with pytest.raises(StartFailed, match="no database") as e:
        await begin(client, home.launch(wake=["print:connecting", "raise:no database"]))

    assert e.value.detail["error"]["phase"] == "wake"
    assert e.value.detail["log_tail"] == ["connecting"]
    assert len(await client.templates()) == 1
    assert sockets(home) == []


async def test_a_worker_that_dies_while_booting_fails_at_once_with_its_last_lines(
    home: AgentHome, client: AgentClient
) -> None:
    with pytest.raises(StartFailed, match="exit status 3") as e:
        await begin(client, home.launch(boot=["print:one", "print:two", "exit:3"]))

    assert e.value.detail["log_tail"] == ["one", "two"]
    assert e.value.detail["exit_status"] == 3


async def test_an_instance_that_dies_while_waking_fails_at_once(
    home: AgentHome, client: AgentClient
) -> None:
    with pytest.raises(StartFailed, match="exit status 4") as e:
        await begin(client, home.launch(wake=["print:last words", "exit:4"]))

    assert e.value.detail["log_tail"] == ["last words"]


@pytest.mark.parametrize(
    "client, hook, phase, clock_s",
    [
        ("namespaces", "boot", "boot", 6.0),  # a boot gives way for 2 s
        ("namespaces", "wake", "fork", 2.0),
        ("plain", "wake", "fork", 2.0),
    ],
    indirect=["client"],
)
@pytest.mark.slow  # a start that ends by its clock
async def test_a_start_that_takes_too_long_names_the_phase(
    home: AgentHome, client: AgentClient, hook: str, phase: str, clock_s: float
) -> None:
    launch = home.launch(
        startup_timeout_s=clock_s,
        boot=["print:b", "hang"] if hook == "boot" else [],
        wake=["print:b", "hang"],
    )
    if hook == "wake":
        await client.prepare(replace(launch, startup_timeout_s=20.0))
    with pytest.raises(StartTimeout, match=f"within {clock_s:g} s") as e:
        await begin(client, launch)

    assert e.value.detail["phase"] == phase
    assert e.value.detail["log_tail"] == ["b"]
    await until(lambda: sockets(home) == [])


async def test_a_cancelled_start_leaves_nothing(home: AgentHome, client: AgentClient) -> None:
    await client.prepare(home.launch(wake=["hang"]))
    start = asyncio.create_task(begin(client, home.launch(wake=["hang"])))
    await until(lambda: len(sockets(home)) == 1)
    start.cancel()
    await asyncio.wait([start])

    await until(lambda: sockets(home) == [])
    while await client.instances():
        await asyncio.sleep(0.01)


async def test_stop_is_a_sigterm_and_leaves_nothing(home: AgentHome, client: AgentClient) -> None:
    info = await begin(client, home.launch())
    gone = await watching(client, "instance_gone")
    await client.stop(info.id, grace_s=10)

    event = await gone
    assert (event.subject, event.reason, event.detail["exit_status"]) == (info.id, "stopped", 0)
    assert await client.instances() == []
    assert sockets(home) == []
    assert not Path(f"/proc/{info.pid}").exists()
    await client.stop(info.id, grace_s=10)


async def test_a_stop_is_told_before_the_sigterm(home: AgentHome, client: AgentClient) -> None:
    info = await begin(client, home.launch())
    told = await watching(client, "instance_stopping")
    stop = asyncio.create_task(client.stop(info.id, grace_s=10))

    assert (await told).subject == info.id
    assert isinstance(await ask(info, "/"), int)
    await stop


async def test_who_ignores_sigterm_is_killed_after_the_grace(
    home: AgentHome, client: AgentClient
) -> None:
    info = await begin(client, home.launch(wake=["ignore_term"]))
    gone = await watching(client, "instance_gone")
    await client.stop(info.id, grace_s=0.1)

    event = await gone
    assert (event.reason, event.detail["signal"]) == ("killed", "SIGKILL")


async def test_an_instance_that_exits_is_told_with_its_last_lines(
    home: AgentHome, client: AgentClient
) -> None:
    info = await begin(client, home.launch())
    gone = await watching(client, "instance_gone")
    await ask(info, "/print/bye")
    with pytest.raises(OSError):
        await ask(info, "/exit/7")

    event = await gone
    assert (event.reason, event.detail["exit_status"], event.detail["log_tail"]) == (
        "exited",
        7,
        ["bye"],
    )


async def test_instances_outlive_their_template_and_the_next_start_boots_again(
    home: AgentHome, client: AgentClient
) -> None:
    first = await begin(client, home.launch())
    [template] = await client.templates()
    gone = await watching(client, "template_gone")
    os.kill(template.pid, 9)

    assert (await gone).reason == "killed"
    assert isinstance(await ask(first, "/"), int)
    second = await begin(client, home.launch())
    assert second.start_kind is StartKind.COLD
    instance_gone = await watching(client, "instance_gone")
    with pytest.raises(OSError):
        await ask(first, "/exit/5")
    event = await instance_gone
    assert (event.subject, event.detail["exit_status"]) == (first.id, 5)
    assert [i.id for i in await client.instances()] == [second.id]


async def test_a_dropped_template_leaves_its_instances(
    home: AgentHome, client: AgentClient
) -> None:
    info = await begin(client, home.launch())
    await client.drop_template(RevisionKey("f-1@v1-abc"))
    await client.drop_template(RevisionKey("f-1@v1-abc"))

    assert await client.templates() == []
    assert isinstance(await ask(info, "/"), int)


async def test_a_worker_with_threads_serves_in_place_one_slot_each(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch(boot=["thread"])
    infos = await asyncio.gather(*(begin(client, launch) for _ in range(3)))

    assert {i.start_kind for i in infos} == {StartKind.COLD}
    assert len({Path(i.socket).parent for i in infos}) == 3
    assert await client.templates() == []
    await asyncio.gather(*(client.stop(i.id, grace_s=5) for i in infos))
    assert await client.instances() == []


@pytest.mark.root
async def test_a_process_that_user_code_left_running_belongs_to_an_instance_and_goes_with_it(
    home: AgentHome,
) -> None:
    async with home.agent(), home.client() as client:
        info = await begin(client, home.launch(boot=["process"]))

        assert await client.templates() == []
        await client.stop(info.id, grace_s=5)
        assert sockets(home) == []


async def test_a_server_that_was_prepared_is_woken(home: AgentHome, client: AgentClient) -> None:
    template = await client.prepare(home.launch(boot=["thread"]))
    assert template.threads == ("surplus",)

    used = await watching(client, "template_gone")
    assert (await begin(client, home.launch(boot=["thread"]))).start_kind is StartKind.WAKE
    assert (await used).reason == "used"
    assert (await begin(client, home.launch(boot=["thread"]))).start_kind is StartKind.COLD


async def test_not_forkable_is_one_process_each(home: AgentHome, client: AgentClient) -> None:
    infos = [await begin(client, home.launch(forkable=False)) for _ in range(2)]
    assert [i.start_kind for i in infos] == [StartKind.COLD, StartKind.COLD]


async def test_lines_are_found_by_labels_call_and_tail_and_followed(
    home: AgentHome, client: AgentClient
) -> None:
    info = await begin(client, home.launch(boot=["print:booting"]))
    await ask(info, "/print/hello")
    await client.stop(info.id, grace_s=5)

    lines = [line async for line in await client.logs(labels={"app": "a"})]
    assert [(line["text"], line["call"]) for line in lines] == [
        ("booting", None),
        ("hello", "call-1"),
    ]
    assert [line["text"] async for line in await client.logs(labels={}, call_id="call-1")] == [
        "hello"
    ]
    assert [line["text"] async for line in await client.logs(labels={}, tail=1)] == ["hello"]
    assert [line async for line in await client.logs(labels={"app": "other"})] == []

    other = await begin(client, home.launch())
    following = await client.logs(labels={"app": "a"}, instance_id=other.id, follow=True)
    await ask(other, "/print/live")
    async for line in following:
        assert line["text"] == "live"
        break


async def test_exec_runs_beside_the_instance(home: AgentHome, client: AgentClient) -> None:
    info = await begin(client, home.launch(), secret_env={"TOKEN": "t"})
    script = "echo $TOKEN; echo oops >&2; exit 3"
    parts = [part async for part in client.exec(info.id, ["/bin/sh", "-c", script])]

    assert parts[-1] == {"exit_status": 3}
    assert {p["stream"]: p["text"] for p in parts[:-1]} == {"stdout": "t\n", "stderr": "oops\n"}
    with pytest.raises(InstanceUnknown):
        _ = [part async for part in client.exec(instance_id(), ["true"])]


async def test_python_is_the_interpreter_of_the_function(
    home: AgentHome, client: AgentClient
) -> None:
    """Debian's has no `python`."""
    info = await begin(client, home.launch())
    ask_both = "for name in python python3; do $name -c 'import sys; print(sys.version)'; done"
    parts = [part async for part in client.exec(info.id, ["/bin/sh", "-c", ask_both])]
    assert "".join(part.get("text", "") for part in parts) == f"{sys.version}\n" * 2


async def test_usage_counts_memory_and_time(home: AgentHome, client: AgentClient) -> None:
    info = await begin(client, home.launch())
    await ask(info, f"/allocate/{32 * MIB}")
    usage = await client.usage(info.id)

    assert usage["memory_bytes"] >= 32 * MIB
    assert usage["pss_bytes"] >= 32 * MIB
    assert usage["cpu_ns"] > 0


async def test_one_that_prints_100_mb_hurts_nobody(home: AgentHome, client: AgentClient) -> None:
    loud, quiet = await begin(client, home.launch()), await begin(client, home.launch())
    flood = asyncio.create_task(ask(loud, f"/flood/{100 * MIB}"))
    while not flood.done():
        await ask(quiet, "/print/calm")
        await asyncio.sleep(0.02)

    await flood
    held = sum(f.stat().st_size for f in (home.paths.home / "node/logs").glob(f"{loud.id}.log*"))
    assert held < 2 * 10 * MIB + MIB
    assert "calm" in [
        line["text"] async for line in await client.logs(labels={}, instance_id=quiet.id)
    ]


async def test_weights_are_leased_for_as_long_as_the_slot_lives(
    home: AgentHome, client: AgentClient
) -> None:
    info = await begin(client, home.launch(weights=(WeightsMount(name="w", manifest="0" * 64),)))
    assert list(home.weights.held.values()) == [Path(info.socket).parent.name]

    await client.drop_template(info.revision)
    await client.stop(info.id, grace_s=5)
    await until(lambda: home.weights.held == {})


@pytest.mark.soak
async def test_fifty_lives_leave_no_descriptor_no_zombie_no_directory(
    home: AgentHome, client: AgentClient
) -> None:
    await client.stop((await begin(client, home.launch())).id, grace_s=5)
    before = await settled_descriptors()
    for _ in range(10):
        infos = await asyncio.gather(*(begin(client, home.launch()) for _ in range(5)))
        await asyncio.gather(*(client.stop(i.id, grace_s=5) for i in infos))

    assert await settled_descriptors() <= before
    assert sockets(home) == []
    [template] = await client.templates()
    shim = int(Path(f"/proc/{template.pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert Path(f"/proc/{shim}/task/{shim}/children").read_text().split() == [str(template.pid)]
    assert Path(f"/proc/{template.pid}/task/{template.pid}/children").read_text() == ""
    assert len(os.listdir(f"/proc/{shim}/fd")) < 24
    assert {n for n in Cgroups.find(home.paths.run).names() if n.startswith("i-")} == set()


async def test_claims_beyond_the_node_are_refused_and_unused_templates_go_first(
    home: AgentHome,
) -> None:
    async with home.agent(memory_bytes=512 * MIB), home.client() as client:
        await client.prepare(home.launch("f-2@v1", boot=[f"allocate:{64 * MIB}"]))
        while (await client.templates())[0].pss_bytes < 64 * MIB:
            await asyncio.sleep(0.01)
        infos = [await begin(client, home.launch()) for _ in range(2)]
        assert [t.revision for t in await client.templates()] == ["f-1@v1-abc"]

        with pytest.raises(NoCapacity) as e:
            await begin(client, home.launch())
        assert e.value.detail == {
            "resource": "memory",
            "asked": 256 * MIB,
            "free": 0,
            "claimed": 512 * MIB,
            "total": 512 * MIB,
        }
        await client.stop(infos[0].id, grace_s=5)
        await begin(client, home.launch())


async def test_a_start_that_finds_no_memory_is_told_to_the_watchers(home: AgentHome) -> None:
    async with home.agent(memory_bytes=256 * MIB), home.client() as client:
        wanted = await watching(client, "room_wanted")
        await begin(client, home.launch(labels={"tenant": "t-1"}), share=TenantShare(tenant="t-1"))
        with pytest.raises(NoCapacity):
            await begin(
                client, home.launch(labels={"tenant": "t-2"}), share=TenantShare(tenant="t-2")
            )
        event = await wanted
        assert event.subject.startswith("i-")
        assert (event.detail["tenant"], event.detail["claims"], event.detail["free"]) == (
            "t-2",
            {"t-1": 256 * MIB},
            0,
        )


async def test_what_is_reserved_for_a_tenant_is_kept_free_for_it(home: AgentHome) -> None:
    async with home.agent(memory_bytes=512 * MIB), home.client() as client:
        reserved = {"t-2": 256 * MIB}
        one, two = (
            TenantShare(tenant=name, name=name, reserved=reserved) for name in ("t-1", "t-2")
        )
        await begin(client, home.launch(labels={"tenant": "t-1"}), share=one)
        with pytest.raises(NoCapacity, match="0 MiB of 512 MiB free"):
            await begin(client, home.launch(labels={"tenant": "t-1"}), share=one)
        await begin(client, home.launch(labels={"tenant": "t-2"}), share=two)


async def test_a_dedicated_node_starts_nothing_of_others(home: AgentHome) -> None:
    async with home.agent(dedicated_to="acme"), home.client() as client:
        for share in (None, TenantShare(tenant="t-1", name="other")):
            with pytest.raises(NoCapacity, match="dedicated"):
                await begin(client, home.launch(), share=share)
            with pytest.raises(NoCapacity, match="dedicated"):
                await client.prepare(home.launch(), share=share)
        await begin(
            client, home.launch(), share=TenantShare(tenant="t-2", name="acme", is_dedicated=True)
        )


async def test_templates_over_budget_go_least_recently_used_first(home: AgentHome) -> None:
    async with home.agent(template_memory_bytes=100 * MIB), home.client() as client:
        for name in ("f-1@v1", "f-2@v1", "f-3@v1"):
            gone = await watching(client, "template_gone")
            await client.prepare(home.launch(name, boot=[f"allocate:{40 * MIB}"]))
            if name != "f-3@v1":
                gone.cancel()
                await begin(client, home.launch("f-1@v1"))

        event = await gone
        assert (event.subject, event.reason) == ("f-2@v1", "evicted")


@pytest.mark.root
async def test_user_code_never_runs_as_root(home: AgentHome) -> None:
    async with home.agent(), home.client() as client:
        with pytest.raises(Unsupported, match="never runs as root"):
            await begin(client, home.launch(uid=None))


@pytest.mark.root
async def test_uid_privileges_and_system_calls_are_really_taken_away(home: AgentHome) -> None:
    async with home.agent(), home.client() as client:
        info = await begin(client, home.launch(uid=20007))
        status = await ask(info, "/status")

        assert status["Uid"].split() == status["Gid"].split() == ["20007"] * 4
        assert (status["NoNewPrivs"], status["Seccomp"], int(status["CapEff"], 16)) == ("1", "2", 0)
        assert int(status["NSpid"].split()[-1]) > 1000
        assert await ask(info, "/syscalls") == {
            "io_uring_setup": 38,
            "ptrace": 1,
            "mount": 1,
            "unshare": 1,
        }
        assert await ask(info, "/env/HOME") == "/run/pilotlight/slot/work"
        shown = [
            p
            async for p in client.exec(
                info.id,
                ["/bin/sh", "-c", "id -u; ls /tmp; touch /tmp/x /run/pilotlight/slot/work/y; pwd"],
            )
        ]
        assert "".join(p["text"] for p in shown[:-1]) == "20007\n/run/pilotlight/slot/work\n"
        mark = f"pl-{info.id}"
        script = (
            f"for d in /tmp /var/tmp /run/lock /dev/shm; do touch $d/{mark} 2>/dev/null; "
            f"done; ls /tmp/{mark}"
        )
        made = [p async for p in client.exec(info.id, ["/bin/sh", "-c", script])]
        assert made[-1]["exit_status"] == 0
        assert not [
            d
            for d in ("/tmp", "/var/tmp", "/run/lock", "/dev/shm")
            if os.path.exists(f"{d}/{mark}")
        ]
        refused = [
            p
            async for p in client.exec(
                info.id,
                ["/bin/sh", "-c", f"ls {home.paths.home} || touch /run/pilotlight/slot/code/z"],
            )
        ]
        assert refused[-1]["exit_status"] != 0


@pytest.mark.root
async def test_out_of_memory_is_named_and_hurts_no_neighbour(home: AgentHome) -> None:
    if not Cgroups.find(home.paths.run).limits_memory:
        pytest.skip("no cgroup memory controller here")
    async with home.agent(), home.client() as client:
        greedy, neighbour = await begin(client, home.launch()), await begin(client, home.launch())
        gone = await watching(client, "instance_gone")
        with pytest.raises(OSError):
            await ask(greedy, f"/allocate/{400 * MIB}")

        event = await gone
        assert (event.subject, event.reason) == (greedy.id, "out_of_memory")
        assert "256 MiB" in event.message
        assert isinstance(await ask(neighbour, "/"), int)
        with pytest.raises(StartFailed) as e:
            await begin(client, home.launch("f-9@v1", boot=[f"allocate:{400 * MIB}"]))
        assert e.value.detail["exit_reason"] == "out_of_memory"


@pytest.mark.root
async def test_processes_that_an_instance_left_behind_go_with_it(home: AgentHome) -> None:
    async with home.agent(), home.client() as client:
        info = await begin(client, home.launch())
        await ask(info, "/spawn")
        [group] = [
            g
            for name in Cgroups.find(home.paths.run).names()
            if (g := Cgroups.find(home.paths.run).group(name)) and name == info.id
        ]
        pids = Path(group.procs[0]).read_text().split()
        assert len(pids) == 2
        await client.stop(info.id, grace_s=5)
        # until the shim has reaped them
        await until(lambda: not any(Path(f"/proc/{pid}/fd").exists() for pid in pids))


async def test_what_the_agent_writes_is_private_but_for_what_workers_read(home: AgentHome) -> None:
    with home.agent_process():
        async with home.client() as client:
            info = await begin(client, home.launch())
            assert isinstance(await ask(info, "/"), int)
            umask = next(
                line
                for line in Path(f"/proc/{info.pid}/status").read_text().splitlines()
                if line.startswith("Umask")
            )
            written = [*(home.paths.home / "node").rglob("*"), *home.paths.run.rglob("*")]
            read_by_all = {
                path.name for path in written if path.is_file() and path.stat().st_mode & 0o077
            }

    assert umask.split() == ["Umask:", "0022"]  # user code has the usual one
    assert {"snapshotter.pid", "cgroups.json", "housing.json"} <= {path.name for path in written}
    assert read_by_all == {"app.py", "launch.json"}


async def test_stopping_an_instance_that_starts_is_told_to_whoever_waits_for_it(
    home: AgentHome, client: AgentClient
) -> None:
    name = instance_id()
    start = asyncio.create_task(begin(client, home.launch(boot=["hang"]), instance_id=name))
    while not any(info.id == name for info in await client.instances()):
        await asyncio.sleep(0.005)
    await client.stop(name, grace_s=5)
    with pytest.raises(StartStopped, match="stopped while it started"):
        await start

"""What the data plane knows, and how it refuses what it cannot understand."""

from __future__ import annotations

import hashlib
import zlib

import pytest

from activator.routing.route_table import ANONYMOUS, RouteTable
from pilotlight import errors
from pilotlight.protocol import FeedChange
from pilotlight.spec.function import MethodSpec
from pilotlight.spec.identifiers import FunctionAddress, TenantId
from pilotlight.spec.instances.scaling import Scaling
from tests.fakes.routes import (
    SCHEMA,
    TENANT,
    change,
    empty_table,
    route_of,
    spec_of,
    target_of,
)


def address(
    app: str = "shop", function: str = "hello", tenant: str = TENANT, environment: str = "main"
) -> FunctionAddress:
    return FunctionAddress(
        tenant=TenantId(tenant), environment=environment, app=app, function=function
    )


def key_change(seq: int, key: str, *, expires_at: float | None = None) -> FeedChange:
    record = {
        "id": "k-1",
        "hash": hashlib.sha256(key.encode()).hexdigest(),
        "tenant": TENANT,
        "scope": "invoke",
        "expires_at": expires_at,
    }
    return FeedChange(seq=seq, kind="key", key="k-1", value=record)


def test_a_function_is_found_by_tenant_environment_app_and_name() -> None:
    table = empty_table()
    table.apply(change(1, route_of(spec_of())))

    assert table.target(address()).revision == "v1-abcdef"
    for wrong in (
        address(app="other"),
        address(function="other"),
        address(tenant="t-2"),
        address(environment="staging"),
    ):
        with pytest.raises(errors.NotFound):
            table.target(wrong)


def test_a_removed_function_is_gone_at_once() -> None:
    table = empty_table()
    table.apply(change(1, route_of(spec_of())))
    table.target(address())
    table.apply(FeedChange(seq=2, kind="function", key=f"{TENANT}/main/shop/hello", value=None))

    with pytest.raises(errors.NotFound):
        table.target(address())


def test_who_may_not_call_a_function_is_refused_without_a_look_at_its_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = empty_table()
    table.apply(change(1, route_of(spec_of())))
    table.apply(change(2, route_of(spec_of("open", access=("*",)))))
    unpacked: list[int] = []
    unpack = zlib.decompress

    def counting(data: bytes) -> bytes:
        unpacked.append(len(data))
        return unpack(data)

    monkeypatch.setattr(zlib, "decompress", counting)

    with pytest.raises(errors.NotFound):
        table.routed_for(ANONYMOUS, address())
    assert unpacked == []
    assert table.routed_for(ANONYMOUS, address(function="open")).targets
    assert len(unpacked) == 1


def test_whom_a_function_is_shared_with_follows_its_document() -> None:
    table = empty_table()
    for seq, access, is_open in ((1, ("*",), True), (2, (), False), (3, ("*",), True)):
        table.apply(change(seq, route_of(spec_of(access=access))))
        assert is_refused(table, address()) is not is_open
    table.apply(FeedChange(seq=4, kind="function", key=f"{TENANT}/main/shop/hello", value=None))
    assert is_refused(table, address())


def is_refused(table: RouteTable, of: FunctionAddress) -> bool:
    try:
        table.routed_for(ANONYMOUS, of)
    except errors.NotFound:
        return True
    return False


def test_a_new_revision_replaces_the_old_one() -> None:
    table = empty_table()
    table.apply(change(1, route_of(spec_of())))
    table.target(address())
    table.apply(change(2, route_of(spec_of(), revision="v2-fedcba")))

    assert table.target(address()).revision == "v2-fedcba"


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda d: d.update(traffic=[["v1-abcdef", 60]]), id="traffic does not add up"),
        pytest.param(
            lambda d: d.update(traffic=[["v9-000000", 100]]), id="traffic names an unknown revision"
        ),
        pytest.param(
            lambda d: d["revisions"]["v1-abcdef"]["spec"].update(scaling={"max_inputs": 0}),
            id="spec breaks a bound",
        ),
        pytest.param(lambda d: d["revisions"]["v1-abcdef"].pop("launch"), id="launch is missing"),
        pytest.param(lambda d: d.clear(), id="empty"),
    ],
)
def test_a_broken_document_is_refused_and_the_last_good_one_stays(damage: object) -> None:
    table = empty_table()
    table.apply(change(1, route_of(spec_of())))
    broken = change(2, route_of(spec_of(), revision="v1-abcdef"))
    damage(broken.value)  # type: ignore[operator]

    assert table.apply(broken) is False
    assert table.target(address()).revision == "v1-abcdef"
    assert (table.refused, table.version) == (1, 2)


def test_an_unknown_kind_of_change_is_refused_and_counted() -> None:
    table = empty_table()

    assert table.apply(FeedChange(seq=7, kind="weather", key="x", value={})) is False
    assert table.refused == 1


def test_a_key_that_is_written_in_a_thousand_ways_is_remembered_in_one() -> None:
    table = empty_table()
    table.apply(key_change(1, "pl_secret"))
    for spaces in range(1, 1000):
        assert table.authenticate(b"Bearer" + b" " * spaces + b"pl_secret", 0.0).tenant == TENANT
        table.authenticate(b"bEaReR pl_secret" + b" " * spaces, 0.0)
    assert "<ApiKeyIndex 1, 1 in use>" in repr(table)


def test_a_key_is_known_by_its_hash_and_forgotten_when_revoked() -> None:
    table = empty_table()
    table.apply(key_change(1, "pl_secret"))

    assert table.authenticate(b"Bearer pl_secret", now=0.0).tenant == TENANT
    assert table.authenticate(b"bearer pl_secret", now=0.0).key_id == "k-1"
    table.apply(FeedChange(seq=2, kind="key", key="k-1", value=None))
    with pytest.raises(errors.Unauthenticated):
        table.authenticate(b"Bearer pl_secret", now=0.0)


@pytest.mark.parametrize(
    "header", [b"", b"Bearer", b"Bearer ", b"Basic pl_secret", b"pl_secret", b"Bearer wrong"]
)
def test_anything_but_a_valid_bearer_key_is_unauthenticated(header: bytes) -> None:
    table = empty_table()
    table.apply(key_change(1, "pl_secret"))

    with pytest.raises(errors.Unauthenticated):
        table.authenticate(header, now=0.0)


def test_a_key_ends_at_its_expiry_even_when_it_was_used_before() -> None:
    table = empty_table()
    table.apply(key_change(1, "pl_secret", expires_at=100.0))
    table.authenticate(b"Bearer pl_secret", now=99.0)

    with pytest.raises(errors.Unauthenticated, match="expired"):
        table.authenticate(b"Bearer pl_secret", now=100.0)


@pytest.mark.parametrize(
    "body,parameter,says",
    [
        pytest.param(b'{"x": "one"}', "x", "integer", id="wrong type"),
        pytest.param(b"{}", "x", "required", id="missing"),
        pytest.param(b'{"x": 1, "z": 2}', "z", "z", id="unknown name"),
        pytest.param(b'[1, "two"]', "y", "integer", id="wrong type by position"),
    ],
)
def test_a_wrong_argument_is_named(body: bytes, parameter: str, says: str) -> None:
    with pytest.raises(errors.InvalidInput, match=says) as wrong:
        target_of(spec_of()).check("").check(body)

    assert wrong.value.detail["parameter"] == parameter


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"x": %b1%b}' % (b"[" * 100_000, b"]" * 100_000), id="nested too deeply"),
        pytest.param(b'{"x": 1, "\\ud800": 1}', id="half a character as a name"),
        pytest.param(b'{"x": 1e999}', id="infinite"),
        *(b"{", b"\xff\xfe", b"1", b'"text"', b"[1,2,3]"),
    ],
)
def test_a_body_that_cannot_be_arguments_is_invalid(body: bytes) -> None:
    with pytest.raises(errors.InvalidInput):
        target_of(spec_of()).check("").check(body)


@pytest.mark.parametrize(
    "body", [b'{"x": "%b"}' % (b"a" * 100_000), b'{"x": 1, "%b": 1}' % (b"k" * 100_000)]
)
def test_a_problem_does_not_repeat_megabytes_of_the_argument(body: bytes) -> None:
    with pytest.raises(errors.InvalidInput) as wrong:
        target_of(spec_of()).check("").check(body)

    assert len(repr(wrong.value.detail)) + len(str(wrong.value)) < 4000


@pytest.mark.parametrize("body", [b'{"x": 1}', b'{"x": 1, "y": 2}', b"[1]", b"[1, 2]"])
def test_fitting_arguments_pass_by_name_and_by_position(body: bytes) -> None:
    check = target_of(spec_of()).check("")

    assert check.check(body) is None  # type: ignore[func-returns-value]


def test_a_method_that_does_not_exist_is_answered_with_those_that_do() -> None:
    target = target_of(
        spec_of("Model", methods=(MethodSpec(name="embed", schema=SCHEMA), MethodSpec(name="rank")))
    )

    with pytest.raises(errors.NotFound, match="embed, rank"):
        target.check("embedd")


def test_functions_that_want_instances_without_being_asked_are_listed() -> None:
    table = empty_table()
    table.apply(change(1, route_of(spec_of("cold"))))
    table.apply(change(2, route_of(spec_of("warm", scaling=Scaling(min_instances=1)))))

    assert table.functions.kept_warm() == [f"{TENANT}/main/shop/warm"]


def test_a_function_that_was_never_called_is_not_kept_parsed() -> None:
    table = empty_table()
    table.apply(change(1, route_of(spec_of())))
    first, again = (table.targets_of(f"{TENANT}/main/shop/hello")[0] for _ in range(2))

    assert first is not again
    called = table.target(address())
    assert table.targets_of(f"{TENANT}/main/shop/hello")[0] is called


def test_a_revision_is_found_by_its_key_among_its_tenants_functions_only() -> None:
    table = empty_table()
    table.apply(change(1, route_of(spec_of())))
    key = target_of(spec_of()).key
    found = table.target_keyed(TENANT, key)
    assert found is not None
    assert found.key == key
    assert table.target_keyed("t-of-another", key) is None
    assert table.target_keyed(TENANT, "f-shop-hello@v9-000000") is None
    table.apply(FeedChange(seq=2, kind="function", key=f"{TENANT}/main/shop/hello", value=None))
    assert table.target_keyed(TENANT, key) is None

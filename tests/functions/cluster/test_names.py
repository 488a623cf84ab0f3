"""Names of objects in a cluster: readable where that is safe, never the same for two things, always
names for Kubernetes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.kubernetes import names
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.identifiers import check_name

SETTINGS = ClusterSettings()
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?\Z")
NAMES = st.from_regex(r"\A[A-Za-z]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?\Z")
CLOSE = st.sampled_from(
    [
        "a",
        "b",
        "a-b",
        "b-c",
        "a-b-c",
        "a--b",
        "A",
        "a_b",
        "A-b",
        "c",
        "b--c",
        "a-b--c",
        "x",
        "a" * 63,
        "a" * 62 + "b",
    ]
)
EITHER = NAMES | CLOSE
REVISIONS = st.from_regex(r"\Av[1-9][0-9]{0,9}-[0-9a-f]{6}\Z")


@pytest.mark.parametrize(
    "tenant, environment, expected",
    [
        ("acme", "main", "fn-acme"),
        ("acme", "staging", "fn-acme--staging"),
        ("my-team", "main", "fn-my-team"),
        ("acme-staging", "main", "fn-acme-staging"),
    ],
)
def test_a_tenants_namespace_is_readable(tenant: str, environment: str, expected: str) -> None:
    assert names.tenant_namespace(SETTINGS, tenant, environment) == expected


def test_a_function_keeps_its_name_where_that_is_a_name_for_kubernetes() -> None:
    assert names.service_name("search", "embed") == "search-embed"
    assert names.revision_name("search-embed", "v7-3f2a1c") == "search-embed-v7-3f2a1c"
    assert names.revision_tag("v7-3f2a1c") == "v7-3f2a1c"
    assert names.secret_name("openai") == "secret-openai"


def test_a_class_keeps_its_letters_and_gets_a_mark() -> None:
    assert re.fullmatch(r"search-embedder--\d[0-9a-f]{8}", names.service_name("search", "Embedder"))
    assert names.service_name("search", "Embedder") != names.service_name("search", "embedder")


def test_a_prefix_without_a_hyphen_is_taken_as_it_is() -> None:
    assert names.tenant_namespace(ClusterSettings(namespace_prefix="p"), "acme", "main") == "pacme"


@given(EITHER, EITHER)
def test_every_name_is_a_label_of_rfc_1035(one: str, two: str) -> None:
    service = names.service_name(one, two)
    for name in (names.tenant_namespace(SETTINGS, one, two), service, names.secret_name(one)):
        assert DNS_1035.match(name), name
        assert len(name) <= 63
    assert len(service) <= names.MAX_SERVICE
    revision = names.revision_name(service, "v12345678-3f2a1c")
    assert revision.startswith(f"{service}-")
    assert len(revision) <= 63
    assert len(f"{names.revision_tag('v12345678-3f2a1c')}-{service}") <= 63


@given(EITHER, EITHER, EITHER, EITHER)
def test_two_things_never_share_a_name(one: str, two: str, three: str, four: str) -> None:
    if (one, two) != (three, four):
        assert names.service_name(one, two) != names.service_name(three, four)
        assert names.tenant_namespace(SETTINGS, one, two) != names.tenant_namespace(
            SETTINGS, three, four
        )
    if one != three:
        assert names.secret_name(one) != names.secret_name(three)


@given(REVISIONS, REVISIONS)
def test_revisions_of_any_age_stay_apart(one: str, two: str) -> None:
    service = names.service_name("a" * 63, "b" * 63)
    assert len(names.revision_name(service, one)) <= 63
    assert (names.revision_name(service, one) == names.revision_name(service, two)) == (one == two)


@given(EITHER)
def test_users_names_are_values_of_labels_as_they_are(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", check_name("app", name))


def test_what_was_cut_after_the_same_beginning_stays_apart() -> None:
    one, two = names.service_name("a" * 60, "embed"), names.service_name("a" * 61, "embed")
    assert one != two
    assert one[:30] == two[:30]


def test_labels_of_nodes_name_weights_and_snapshots() -> None:
    weights = "3f2a1c" + "0" * 58
    label = names.weights_label(SETTINGS, weights)
    assert label == "cache.pilotlight.dev/w-3f2a1c000000"
    assert names.weights_label(SETTINGS, f"sha256:{weights}") == label
    assert re.fullmatch(
        r"cache\.pilotlight\.dev/s-[0-9a-f]{12}",
        names.snapshot_label(SETTINGS, "f-0123456789abcdef@v7-3f2a1c"),
    )


def test_a_field_manager_with_any_characters_becomes_a_label() -> None:
    value = names.manager_of(ClusterSettings(field_manager="Team A / pilotlight"))
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", value)
    assert (
        names.function_selector(SETTINGS)
        == "pilotlight.dev/managed-by=pilotlight,pilotlight.dev/function-id"
    )


def test_platforms_of_different_namespaces_have_different_labels() -> None:
    one, two = ClusterSettings(namespace="team-b"), ClusterSettings(namespace="team-c")
    assert names.manager_of(one) == "team-b.pilotlight"
    assert names.weights_label(two, "ab" * 32) == (
        "team-c.pilotlight.cache.pilotlight.dev/w-abababababab"
    )
    long = [names.manager_of(ClusterSettings(namespace="n" * 62 + end)) for end in "ab"]
    assert len(set(long)) == 2
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", value) for value in long)
    assert max(map(len, long)) <= names.MAX_NAME

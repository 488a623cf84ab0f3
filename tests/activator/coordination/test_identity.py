"""Which activator a process is."""

from __future__ import annotations

import pytest

from activator.coordination.identity import FROM_HOSTNAME, Identity, IdentityInvalid, identity_of


def test_a_number_is_one_of_several_on_this_machine() -> None:
    assert identity_of("1", hostname="box", activators=2) == Identity(index=1, is_alone_here=False)


@pytest.mark.parametrize(
    "hostname",
    ["pilotlight-activator-12", "pilotlight-activator-12.pilotlight-activator.pilotlight.svc"],
)
def test_a_pod_of_a_stateful_set_is_told_by_its_name_and_is_alone_where_it_runs(
    hostname: str,
) -> None:
    assert identity_of(FROM_HOSTNAME, hostname=hostname, activators=13) == Identity(
        index=12, is_alone_here=True
    )


@pytest.mark.parametrize(
    "text, hostname, says",
    [
        (FROM_HOSTNAME, "laptop", "'laptop' does not end in -<number>"),
        (FROM_HOSTNAME, "a-2", "from 0 to 1"),
        ("2", "a", "from 0 to 1"),
        ("-1", "a", "a number from 0"),
        ("one", "a", "a number from 0"),
    ],
)
def test_what_names_no_activator_is_refused(text: str, hostname: str, says: str) -> None:
    with pytest.raises(IdentityInvalid, match=says):
        identity_of(text, hostname=hostname, activators=2)

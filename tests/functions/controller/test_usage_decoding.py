"""What arrives as usage records: decoded at once, and refused by record and key."""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import Any

import pytest

from pilotlight.controller.billing import ledger
from pilotlight.errors import InvalidInput
from pilotlight.protocol import UsageRecord
from tests.functions.controller.parts import usage

RECORD = usage().to_json()


def body(*records: Any) -> bytes:
    return json.dumps({"activator": "a-0", "records": records}).encode()


def test_a_record_is_its_values_in_the_order_of_the_fields() -> None:
    shortened = {
        name: value for name, value in RECORD.items() if name not in ("outcome", "finish", "parent")
    }
    other = usage(gpu="H100", note='ü \U0001f600 "q" \\', cpu=0.25)

    assert ledger.decode_records(body(RECORD, shortened, other.to_json())) == [
        astuple(UsageRecord(**RECORD)),
        astuple(UsageRecord(**shortened)),
        astuple(other),
    ]


def test_a_whole_number_is_a_time_and_a_size() -> None:
    (values,) = ledger.decode_records(body({**RECORD, "cpu": 2, "started_at": 1_793_491_200}))

    assert values == astuple(UsageRecord(**{**RECORD, "cpu": 2.0, "started_at": 1793491200.0}))


@pytest.mark.parametrize("json_value", [False, True])
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"attempt": 1.0}, r"records\[1\].attempt = 1.0: expected int"),
        ({"attempt": True}, r"records\[1\].attempt = True: expected int"),
        ({"cpu": "1"}, r"records\[1\].cpu = '1': expected float or int"),
        ({"gpu": 3}, r"records\[1\].gpu = 3: expected str or NoneType"),
        ({"call": None}, r"records\[1\].call = None: expected str"),
        ({"price": 1}, r"records\[1\]: unknown key 'price'"),
    ],
)
def test_a_wrong_value_is_refused_by_record_and_key(
    wrong: dict[str, Any], message: str, *, json_value: bool
) -> None:
    records = [RECORD, {**RECORD, **wrong}]
    with pytest.raises(InvalidInput, match=message):
        ledger.convert_records(records) if json_value else ledger.decode_records(body(*records))


def test_a_missing_value_is_refused_by_record_and_key() -> None:
    records = [{name: value for name, value in RECORD.items() if name != "gpu"}]
    with pytest.raises(InvalidInput, match=r"records\[0\].gpu is missing"):
        ledger.decode_records(body(*records))


@pytest.mark.parametrize(
    "sent, message",
    [
        (b"", "expected"),
        (b"{}", "expected"),
        (b"[]", "expected"),
        (body(RECORD)[:-1], "expected"),
        (body({**RECORD, "cpu": float("nan")}), "expected"),
        (body({**RECORD, "cpu": float("-inf")}), "expected"),
        (b'{"activator": "\xff", "records": []}', "expected"),
        (b'{"records": null}', "must be a list of objects"),
        (b'{"records": [1]}', "must be a list of objects"),
    ],
)
def test_what_is_no_batch_of_records_is_refused(sent: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ledger.decode_records(sent)

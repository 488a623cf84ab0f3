"""Messages become requests over HTTP and answers messages; what is no message is refused before it
takes memory."""

from __future__ import annotations

import json
import tracemalloc

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.open_inference.grpc import translation
from activator.open_inference.grpc.messages import message_class
from activator.open_inference.grpc.statuses import refused, status_of
from activator.open_inference.grpc.translation import InvalidMessage
from pilotlight.core.binary_tensors import encode

REQUEST = message_class("ModelInferRequest")


def test_a_request_is_the_same_over_http() -> None:
    sent = REQUEST(
        model_name="shop/sum",
        model_version="next",
        id="7",
        parameters={"k": {"int64_param": 3}, "binary_data_output": {"bool_param": False}},
        inputs=[
            {"name": "a", "datatype": "FP32", "shape": [2]},
            {
                "name": "b",
                "datatype": "UINT8",
                "shape": [1],
                "parameters": {"p": {"bool_param": True}},
            },
        ],
        outputs=[{"name": "x"}],
        raw_input_contents=[encode("FP32", [1, 2]), b"\x05"],
    )
    read = translation.parse_infer(sent.SerializeToString())
    size, body = translation.http_body(read)
    assert json.loads(body[:size]) == {
        "id": "7",
        "parameters": {"k": 3, "binary_data_output": True},
        "inputs": [
            {
                "name": "a",
                "datatype": "FP32",
                "shape": [2],
                "parameters": {"binary_data_size": 8},
            },
            {
                "name": "b",
                "datatype": "UINT8",
                "shape": [1],
                "parameters": {"p": True, "binary_data_size": 1},
            },
        ],
        "outputs": [{"name": "x", "parameters": {"binary_data": True}}],
    }
    assert body[size:] == encode("FP32", [1, 2]) + b"\x05"
    path = translation.model_path(read.model_name, read.model_version)
    assert path == "/v2/models/shop/sum/versions/next"


def test_an_answer_over_http_is_a_message() -> None:
    head = json.dumps(
        {
            "model_name": "shop/sum",
            "model_version": "v1",
            "outputs": [
                {
                    "name": "x",
                    "datatype": "INT8",
                    "shape": [2],
                    "parameters": {"binary_data_size": 2},
                },
                {
                    "name": "y",
                    "datatype": "BYTES",
                    "shape": [1],
                    "parameters": {"binary_data_size": 6, "content_type": "application/json"},
                },
            ],
        }
    ).encode()
    answer = translation.infer_response(head + b"\1\2" + encode("BYTES", ["{}"]), len(head))
    assert list(answer.raw_output_contents) == [b"\1\2", encode("BYTES", ["{}"])]
    assert [(o.name, list(o.shape)) for o in answer.outputs] == [("x", [2]), ("y", [1])]
    assert answer.outputs[1].parameters["content_type"].string_param == "application/json"


@pytest.mark.parametrize(
    "name",
    ["", "sum", "a/b/c", "a/b/../../v1", "/b", "a/", "a b/c", "a/b\r\nx: y", "a/" + "b" * 201],
)
def test_a_name_that_is_no_model_makes_no_path(name: str) -> None:
    with pytest.raises(InvalidMessage, match="app/function"):
        translation.model_path(name, "")


def test_a_name_is_one_part_of_a_path() -> None:
    assert translation.model_path("a?b/c#d%2f", "") == "/v2/models/a%3Fb/c%23d%252f"
    with pytest.raises(InvalidMessage, match="version"):
        translation.model_path("a/b", "c/d")


@pytest.mark.parametrize(
    "data,told",
    [
        (b"\x2a\x00" * 8_000_000, "more than 1024 inputs"),
        (b"\x2a\x80\x80\x80\x04" + b"\x22\x00" * 4_194_304, "beside raw_input_contents"),
        (b"\x2a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", "cut off"),
        (b"\x0b", "a group"),
        (b"\x0a\x05a", "no ModelInferRequest"),
        (b"\x0a\x02\xff\xff", "no ModelInferRequest"),
    ],
)
def test_a_message_is_measured_before_it_takes_memory(data: bytes, told: str) -> None:
    tracemalloc.start()
    with pytest.raises(InvalidMessage, match=told):
        translation.parse_infer(data)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    try:
        translation.http_body(translation.parse_infer(data))
    except InvalidMessage:
        pass


@pytest.mark.parametrize(
    "fields,told",
    [
        ({"raw_input_contents": [b"", b""]}, "one for each of the 1 inputs"),
        (
            {
                "inputs": [{"name": "a", "datatype": "INT8", "contents": {"int_contents": [1]}}],
                "raw_input_contents": [b"\1"],
            },
            "beside raw_input_contents",
        ),
        (
            {"inputs": [{"name": "a", "datatype": "INT8", "contents": {"int_contents": [300]}}]},
            "'a': an element is not of datatype INT8",
        ),
        ({"inputs": [{"name": "a", "datatype": "BF16"}]}, "'BF16' must be in raw_input_contents"),
        (
            {
                "inputs": [
                    {
                        "name": "a",
                        "datatype": "BOOL",
                        "contents": {"bool_contents": [True] * 250_001},
                    }
                ]
            },
            "250001 elements, at most 250000",
        ),
    ],
)
def test_contents_that_do_not_fit_are_refused(fields: dict[str, object], told: str) -> None:
    sent = REQUEST(**{"inputs": [{"name": "a", "datatype": "INT8"}], **fields})
    with pytest.raises(InvalidMessage) as raised:
        translation.http_body(translation.parse_infer(sent.SerializeToString()))
    assert told in str(raised.value)


# -- statuses --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "status,code",
    [
        (400, grpc.StatusCode.INVALID_ARGUMENT),
        (402, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (429, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (503, grpc.StatusCode.UNAVAILABLE),
        (418, grpc.StatusCode.INTERNAL),
    ],
)
def test_a_status_has_the_problem_and_when_to_try_again(status: int, code: grpc.StatusCode) -> None:
    headers = {"retry-after": "3", "x-request-id": "req-1", "set-cookie": "x"}
    found = status_of(status, headers, b'{"detail": "too many", "error": "too much"}')
    said = dict(found.metadata)
    assert (found.code, found.text, said["retry-after"]) == (code, "too much", "3")
    assert (said["x-request-id"], "set-cookie" in said) == ("req-1", False)
    details = message_class("Status").FromString(said["grpc-status-details-bin"])
    assert details.details[0].type_url == "type.googleapis.com/google.rpc.RetryInfo"
    info = message_class("RetryInfo").FromString(details.details[0].value)
    assert info.retry_delay.seconds == 3


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_an_error_without_a_problem_has_its_status(body: bytes) -> None:
    assert status_of(500, {}, body).text == "HTTP status 500"
    assert len(status_of(500, {}, json.dumps({"error": "ä" * 9999}).encode()).text.encode()) <= 2048
    assert refused("full", 1.5).metadata

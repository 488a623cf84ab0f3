"""The Open Inference Protocol on a whole platform: by the official clients, over gRPC as a peer that
follows no rules sends it, and while processes die."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from activator.open_inference.grpc.messages import SERVICE, message_class
from pilotlight.core.binary_tensors import encode
from tests.e2e.harness import PlatformUnderTest, platform_up, wait_for
from tests.fakes.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

HERE = Path(__file__).parent
PROCESS = "activator.open_inference.grpc"
MAX_BODY_BYTES = 16 * 2**20


@pytest.fixture(name="grpc_address", scope="module")
def _grpc_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(name="platform", scope="module")
def _platform(grpc_address: str) -> Iterator[PlatformUnderTest]:
    own: dict[str, object] = {
        "listen": f"127.0.0.1:{free_port()}",
        "grpc_listen": grpc_address,
        "max_body_bytes": MAX_BODY_BYTES,
        "max_connections_per_address": 100,
        "waiting_bytes": 64 * 2**20,
        "body_timeout_s": 5.0,
    }
    with platform_up(activator=own) as platform:
        platform.deploy("tensors.py")
        yield platform


@pytest.fixture(name="channel")
def _channel(grpc_address: str, platform: PlatformUnderTest) -> Iterator[grpc.Channel]:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(grpc_address, options) as channel:
        yield channel


def call(
    channel: grpc.Channel,
    method: str,
    body: bytes,
    metadata: dict[str, str],
    *,
    timeout: float = 60.0,
) -> Any:
    """Call a method with the bytes of a message. Returns the message of the answer, and the call."""
    answer, done = channel.unary_unary(f"/{SERVICE}/{method}").with_call(
        body, metadata=tuple(metadata.items()), timeout=timeout
    )
    return message_class(f"{method}Response").FromString(answer), done


def request(model: str, name: str, datatype: str, shape: list[int], **more: Any) -> bytes:
    """A ModelInferRequest with one input. `more`: `contents`, or other fields of the request."""
    contents = more.pop("contents", None)
    tensor = {"name": name, "datatype": datatype, "shape": shape}
    if contents is not None:
        tensor["contents"] = contents
    data: bytes = message_class("ModelInferRequest")(
        model_name=model, inputs=[tensor], **more
    ).SerializeToString()
    return data


def error_of(channel: grpc.Channel, body: bytes, metadata: dict[str, str], **more: Any) -> Any:
    with pytest.raises(grpc.RpcError) as raised:
        call(channel, "ModelInfer", body, metadata, **more)
    return raised.value


def process_of(platform: PlatformUnderTest) -> psutil.Process | None:
    """The activator's process for gRPC, once it serves."""
    try:
        children = psutil.Process(platform.pid("activator")).children()
        return next((child for child in children if PROCESS in child.cmdline()), None)
    except psutil.Error:
        return None


SEEN = request("tensors/seen", "array", "FP32", [2], raw_input_contents=[encode("FP32", [1, 2])])


@pytest.mark.parametrize("client", ["triton", "kserve"])
def test_the_official_clients_work(
    platform: PlatformUnderTest, grpc_address: str, inference_clients: Path, client: str
) -> None:
    key = platform.headers["authorization"].removeprefix("Bearer ")
    ran = subprocess.run(
        [
            str(inference_clients),
            str(HERE / "inference_clients.py"),
            client,
            platform.url.removeprefix("http://"),
            grpc_address,
            key,
        ],
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert f"{client} was served" in ran.stdout, ran.stdout + ran.stderr


def test_typed_contents_and_metadata_are_read(
    platform: PlatformUnderTest, channel: grpc.Channel
) -> None:
    for datatype, contents, elements in (
        ("INT8", {"int_contents": [-1, 2]}, [-1, 2]),
        ("UINT64", {"uint64_contents": [1, 2**64 - 1]}, [1, 2**64 - 1]),
        ("BOOL", {"bool_contents": [True, False]}, [True, False]),
        ("BYTES", {"bytes_contents": [b"a", b"\xff"]}, [b"a", b"\xff"]),
    ):
        body = request("tensors/seen", "array", datatype, [2], contents=contents, id="7")
        answer, done = call(channel, "ModelInfer", body, platform.headers)
        assert (answer.id, answer.outputs[0].datatype) == ("7", datatype)
        assert list(answer.raw_output_contents) == [encode(datatype, elements)]
        said = dict(done.trailing_metadata())
        assert said["x-request-id"].startswith("req-")
        assert float(said["pilotlight-cost"]) > 0
    metadata = message_class("ModelMetadataRequest")(name="tensors/scaled").SerializeToString()
    described, _ = call(channel, "ModelMetadata", metadata, platform.headers)
    assert [(i.name, i.datatype) for i in described.inputs] == [
        ("image", "FP32"),
        ("scale", "FP64"),
    ]


def test_errors_have_the_status_of_their_kind(
    platform: PlatformUnderTest, channel: grpc.Channel
) -> None:
    code = grpc.StatusCode
    mine = platform.headers
    stranger = {"authorization": "Bearer pl_nobody"}
    unknown = request("tensors/missing", "x", "FP32", [1], raw_input_contents=[bytes(4)])
    for body, metadata, status, told in (
        (SEEN, {}, code.UNAUTHENTICATED, "API key"),
        (SEEN, stranger, code.UNAUTHENTICATED, "API key"),
        (unknown, mine, code.NOT_FOUND, "no function"),
        (request("tensors", "x", "FP32", [1]), mine, code.INVALID_ARGUMENT, "app/function"),
        (request("../v1/x", "x", "FP32", [1]), mine, code.INVALID_ARGUMENT, "app/function"),
        (request("tensors/seen", "array", "FP16", [1]), mine, code.INVALID_ARGUMENT, "raw_input"),
        (request("tensors/seen", "array", "FP32", [2]), mine, code.INVALID_ARGUMENT, "takes 8"),
        (
            request("tensors/seen", "array", "INT8", [1], contents={"int_contents": [999]}),
            mine,
            code.INVALID_ARGUMENT,
            "not of datatype INT8",
        ),
        (
            request("tensors/fails", "image", "FP32", [1], raw_input_contents=[bytes(4)]),
            mine,
            code.UNKNOWN,
            "ValueError: no",
        ),
        (bytes(MAX_BODY_BYTES + 1), mine, code.RESOURCE_EXHAUSTED, "larger than max"),
    ):
        error = error_of(channel, body, metadata)
        assert (error.code(), told in error.details()) == (status, True), error
    late = request(
        "tensors/dies", "seconds", "FP64", [1], raw_input_contents=[encode("FP64", [30])]
    )
    assert error_of(channel, late, mine, timeout=1.0).code() is code.DEADLINE_EXCEEDED


def test_another_tenant_sees_no_model_and_its_quota_says_when_to_try_again(
    platform: PlatformUnderTest, channel: grpc.Channel
) -> None:
    made = platform.cli("tenant", "create", "other", "--plan", "free", "--json").stdout
    other = {"authorization": f"Bearer {json.loads(made)['key']['secret']}"}
    wait_for(
        lambda: error_of(channel, SEEN, other).code() is grpc.StatusCode.NOT_FOUND,
        "the activator to know the key",
    )
    limited = platform.cli(
        "token", "create", "--quota", "requests_per_s=0.01", "--quota", "burst=1", "--json"
    )
    mine = {"authorization": f"Bearer {json.loads(limited.stdout)['secret']}"}

    def refused() -> Any:
        try:
            call(channel, "ModelInfer", SEEN, mine)
        except grpc.RpcError as e:
            return e if e.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else None
        return None

    said = dict(wait_for(refused, "the quota to be used up").trailing_metadata())
    assert 0 < int(said["retry-after"]) <= 100
    status = message_class("Status").FromString(said["grpc-status-details-bin"])
    info = message_class("RetryInfo").FromString(status.details[0].value)
    assert info.retry_delay.seconds == int(said["retry-after"])


def test_a_worker_that_dies_and_a_caller_who_leaves_end_one_call(
    platform: PlatformUnderTest, channel: grpc.Channel
) -> None:
    mine = platform.headers
    killed = request("tensors/dies", "seconds", "FP64", [1], raw_input_contents=[bytes(8)])
    error = error_of(channel, killed, mine)
    assert (error.code(), "the instance" in error.details()) == (grpc.StatusCode.UNAVAILABLE, True)

    slow = request(
        "tensors/dies", "seconds", "FP64", [1], raw_input_contents=[encode("FP64", [60])]
    )
    left = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(slow, metadata=tuple(mine.items()))
    time.sleep(1)
    left.cancel()
    wait_for(
        lambda: platform.usage("function = 'dies' AND outcome = 'cancelled'"),
        "the call to end as cancelled",
    )
    assert call(channel, "ModelInfer", SEEN, mine)[0].outputs


def test_peers_that_follow_no_rules_reach_no_other_call(
    platform: PlatformUnderTest, channel: grpc.Channel, grpc_address: str
) -> None:
    data = bytes(10_000_000)
    large = request("tensors/scaled", "image", "FP32", [2_500_000, 1], raw_input_contents=[data])
    for _ in range(5):  # the allocator keeps what some took
        assert call(channel, "ModelInfer", large, platform.headers)[0].outputs
    activator = psutil.Process(platform.pid("activator"))
    before = activator.memory_info().rss
    process = wait_for(lambda: process_of(platform), "the process for gRPC")
    own_before = process.memory_info().rss
    host, _, port = grpc_address.partition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    opened = []
    for number in range(300):
        peer = socket.create_connection((host, int(port)))
        opened.append(peer)
        junk = (
            os.urandom(2048),
            preface + os.urandom(2048),
            preface + b"\xff\xff\xff\x00\x00" + (1).to_bytes(4, "big") + bytes(4096),
            preface + 500 * (b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)),  # pings
            preface + 500 * b"\0\0\0\x04\0\0\0\0\0",  # settings
            b"GET / HTTP/1.1\r\n\r\n",
        )[number % 6]
        try:
            peer.sendall(junk)
        except OSError:
            pass  # it was cut off
    for peer in opened:
        peer.close()

    for _ in range(30):  # which are let go of
        assert call(channel, "ModelInfer", large, platform.headers)[0].outputs

    # messages of empty parts, which would take a hundred times their size
    for body in (
        b"\x2a\x00" * (MAX_BODY_BYTES // 2),
        b"\x0a" * 1_000_000,
        b"\x2a\xff\xff\xff\xff\x0f",
        b"\x0b\x0c",
        os.urandom(100_000),
    ):
        error = error_of(channel, body, platform.headers)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    assert call(channel, "ModelInfer", SEEN, platform.headers)[0].outputs
    assert process_of(platform) == process, "it did not even end"
    # a few of the bodies, which it may be sending; all of them are 300 MB
    assert activator.memory_info().rss - before < 64 * 2**20
    assert "Fatal error on transport" not in platform.log_tails(200)
    assert process.memory_info().rss - own_before < 200 * 2**20


def test_the_process_is_started_again_and_http_does_not_notice(
    platform: PlatformUnderTest, grpc_address: str
) -> None:
    process = wait_for(lambda: process_of(platform), "the process for gRPC")
    os.kill(process.pid, signal.SIGKILL)
    array = np.array([1.0])
    assert platform.result("tensors/seen", {"array": array.tolist()}) == [1.0]
    with grpc.insecure_channel(grpc_address) as channel:
        grpc.channel_ready_future(channel).result(timeout=30)
        assert call(channel, "ModelInfer", SEEN, platform.headers)[0].outputs
    assert process_of(platform) != process


def test_an_activator_that_is_killed_comes_back_with_grpc(
    platform: PlatformUnderTest, grpc_address: str
) -> None:
    platform.wait_restarted("activator", platform.kill("activator"))
    with grpc.insecure_channel(grpc_address) as channel:
        grpc.channel_ready_future(channel).result(timeout=30)
        assert call(channel, "ModelInfer", SEEN, platform.headers)[0].outputs
    log = (platform.local.logs / "activator.log").read_text()
    assert "cannot listen" not in log

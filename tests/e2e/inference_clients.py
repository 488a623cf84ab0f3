"""Drives a platform with the official clients of the Open Inference Protocol: NVIDIA's tritonclient
over HTTP and gRPC, and those of KServe.

Run by the interpreter of the environment that `scripts/install-inference-clients` makes, whose
version of protobuf is not the platform's. Arguments: `triton` or `kserve`, whose messages have the
same names, so that a process has one of them; the addresses for HTTP and gRPC; the API key."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np

NUMBERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
DATATYPES = ("BOOL", *NUMBERS, "FP16", "FP32", "FP64", "BF16")


def main() -> None:
    which, http, grpc, key = sys.argv[1:]
    headers = {"authorization": f"Bearer {key}"}
    if which == "kserve":
        asyncio.run(kserves(http, grpc, headers))
    else:
        import tritonclient.grpc
        import tritonclient.http

        for client, address in ((tritonclient.http, http), (tritonclient.grpc, grpc)):
            triton(client, client.InferenceServerClient(address), headers)
        binary_and_json(tritonclient.http, http, headers)
    print(f"{which} was served")


def triton(client: Any, server: Any, headers: dict[str, str]) -> None:
    """The whole of tritonclient's inference, over one transport."""
    import ml_dtypes
    from tritonclient.utils import InferenceServerException

    assert server.is_server_live()
    assert server.is_server_ready()
    assert server.is_model_ready("tensors/scaled", headers=dict(headers))
    server.get_server_metadata()
    server.get_model_metadata("tensors/scaled", headers=dict(headers))

    def infer(model: str, name: str, array: Any, datatype: str, **more: Any) -> Any:
        tensor = client.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        return server.infer(model, [tensor], headers=dict(headers), **more)

    for datatype in DATATYPES:
        dtype = {"BOOL": np.bool_, "BF16": ml_dtypes.bfloat16}.get(
            datatype, datatype.lower().replace("fp", "float")
        )
        array = np.array([[0, 1, 1], [1, 0, 0]], dtype)
        seen = infer("tensors/seen", "array", array, datatype)
        assert seen.as_numpy("output").tolist() == array.tolist(), datatype
        assert seen.get_output("output") is not None
    text = np.array(["a", "ä", ""], object)
    assert infer("tensors/seen", "array", text, "BYTES").as_numpy("output").tolist() == [
        b"a",
        "ä".encode(),
        b"",
    ]
    data = np.array([b"desserts\xff"], object)
    assert infer("tensors/reverse", "data", data, "BYTES").as_numpy("output")[0] == b"\xffstressed"
    rows = np.array([[0.5, 1.5]])
    assert infer("tensors/summed", "rows", rows, "FP64").as_numpy("output").tolist() == [2.0]

    large = np.arange(2_000_000, dtype="f4").reshape(-1, 2)
    asked = [client.InferRequestedOutput("mean")]
    found = infer("tensors/scaled", "image", large, "FP32", outputs=asked, request_id="7")
    np.testing.assert_allclose(found.as_numpy("mean"), large.mean(0), rtol=1e-3)

    for model, name, array, datatype, told in (
        ("tensors/missing", "x", large[:1], "FP32", "no function"),
        ("tensors/scaled", "x", large[:1], "FP32", "argument 'x'"),
        ("tensors/fails", "image", large[:1], "FP32", "ValueError"),
        ("tensors/summed", "rows", np.zeros((1, 250_001)), "FP64", "at most 250000"),
    ):
        said = ""
        try:
            infer(model, name, array, datatype)
        except InferenceServerException as e:
            said = str(e)
        assert told in said, (told, said)
    try:
        server.infer("tensors/scaled", [client.InferInput("image", [1], "FP32")])
    except InferenceServerException as e:
        said = str(e)
    assert "API key" in said, said
    server.close()


def binary_and_json(client: Any, address: str, headers: dict[str, str]) -> None:
    """What only HTTP has: tensors in JSON, and compressed bodies."""
    server = client.InferenceServerClient(address)
    array = np.array([1.5, 2.5], "f4")
    for is_binary in (True, False):
        tensor = client.InferInput("array", [2], "FP32")
        tensor.set_data_from_numpy(array, binary_data=is_binary)
        output = client.InferRequestedOutput("output", binary_data=not is_binary)
        found = server.infer("tensors/seen", [tensor], outputs=[output], headers=dict(headers))
        assert found.as_numpy("output").tolist() == array.tolist()
    for coding in ("gzip", "deflate"):
        found = server.infer(
            "tensors/seen",
            [tensor],
            headers=dict(headers),
            request_compression_algorithm=coding,
            response_compression_algorithm=coding,
        )
        assert found.as_numpy("output").tolist() == array.tolist()
    server.close()


async def kserves(http: str, grpc: str, headers: dict[str, str]) -> None:
    """KServe's clients."""
    import kserve
    from kserve.inference_client import RESTConfig

    array = np.array([[1.5, 2.5]], "f4")
    url, rest = f"http://{http}", kserve.InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await rest.is_server_live(url)
    assert await rest.is_server_ready(url)
    assert await rest.is_model_ready(url, "tensors/seen", headers=headers)
    over_grpc = kserve.InferenceGRPCClient(grpc)
    metadata = tuple(headers.items())
    assert await over_grpc.is_server_live()
    assert await over_grpc.is_model_ready("tensors/seen", headers=metadata)
    for is_binary in (False, True):
        tensor = kserve.InferInput("array", [1, 2], "FP32")
        tensor.set_data_from_numpy(array, binary_data=is_binary)
        request = kserve.InferRequest("tensors/seen", [tensor], request_id="7")
        answers = [
            await rest.infer(url, request, headers=headers, model_name="tensors/seen"),
            await over_grpc.infer(request, headers=metadata),
        ]
        for answer in answers:
            assert answer.id == "7"
            assert answer.outputs[0].as_numpy().tolist() == array.tolist()


if __name__ == "__main__":
    main()

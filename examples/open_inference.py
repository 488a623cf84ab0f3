"""A model for clients of the Open Inference Protocol, such as `tritonclient` and those of KServe.

Parameters that are annotated as arrays take tensors of any size as they are: their bytes are sent
after the JSON, or over gRPC, and become an array without being parsed.

    pilotlight deploy open_inference.py

    import numpy
    import tritonclient.http as client

    image = numpy.zeros((1, 224, 224, 3), numpy.float32)
    tensor = client.InferInput("image", list(image.shape), "FP32")
    tensor.set_data_from_numpy(image)
    server = client.InferenceServerClient("127.0.0.1:8700")
    key = {"Authorization": f"Bearer {api_key}"}
    print(server.infer("vision/features", [tensor], headers=key).as_numpy("mean"))
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import pilotlight

app = pilotlight.App("vision")


@app.function()
def features(image: npt.NDArray[np.float32], scale: float = 1.0) -> dict[str, Any]:
    """Mean and deviation of each channel of images."""
    axes = tuple(range(image.ndim - 1))
    return {
        "mean": image.mean(axes, dtype=np.float32) * np.float32(scale),
        "deviation": image.std(axes, dtype=np.float32),
    }


@app.function()
def grayscale(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The body of a call may be the array itself, as `numpy.save` writes it."""
    gray: npt.NDArray[np.uint8] = image.mean(axis=-1).astype(np.uint8)
    return gray


@app.function()
def reverse(data: bytes) -> bytes:
    """The body of a call may be the bytes themselves."""
    return data[::-1]

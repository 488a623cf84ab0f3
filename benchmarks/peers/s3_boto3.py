"""boto3's `download_file`, as it comes or with the weight cache's ranges and concurrency. Run by
boto3's own interpreter.

Its CRT client is not here: boto3 makes it speak TLS, whatever the endpoint's scheme says. Orders:
{"bucket", "key", "file", "how": "default" | "ranges"}; answers the seconds of the transfer, and of
the fsync after it."""

import json
import os
import sys
import time
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

RANGE_BYTES, AT_ONCE = 16 * 1024**2, 8
CONFIGURATIONS = {
    "default": TransferConfig(),
    "ranges": TransferConfig(
        multipart_threshold=RANGE_BYTES, multipart_chunksize=RANGE_BYTES, max_concurrency=AT_ONCE
    ),
}


def download(client: Any, order: dict[str, Any]) -> dict[str, float]:
    """One file, then fsync."""
    began = time.perf_counter()
    client.download_file(
        order["bucket"], order["key"], order["file"], Config=CONFIGURATIONS[order["how"]]
    )
    ended = time.perf_counter()
    with open(order["file"], "rb") as file:
        os.fsync(file.fileno())
    return {"transfer_s": ended - began, "fsync_s": time.perf_counter() - ended}


def main() -> None:
    """Take orders until there are no more."""
    client = boto3.client(
        "s3", config=Config(s3={"addressing_style": "path"}, max_pool_connections=2 * AT_ONCE)
    )
    for line in sys.stdin:
        order = json.loads(line)
        try:
            told: dict[str, Any] = {} if "ready" in order else download(client, order)
        except OSError as e:
            told = {"error": str(e)}
        print("answer " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()

"""obstore without verification: ranges at once, each written where it belongs; or one stream, as
its own examples do.

Run by obstore's own interpreter. Orders: {"bucket", "key", "file", "how": "ranges" | "stream"};
answers the seconds of the transfer, and of the fsync after it."""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import obstore
from obstore.store import S3Store

RANGE_BYTES, AT_ONCE = 16 * 1024**2, 8
STORES: dict[str, S3Store] = {}


def download(order: dict[str, Any]) -> dict[str, float]:
    """One file, then fsync."""
    store = STORES.get(order["bucket"])
    if store is None:
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        store = STORES[order["bucket"]] = S3Store(
            order["bucket"], endpoint=endpoint, client_options={"allow_http": True}
        )
    began = time.perf_counter()
    with open(order["file"], "wb", buffering=0) as file:
        (ranges if order["how"] == "ranges" else stream)(store, order["key"], file.fileno())
        ended = time.perf_counter()
        os.fsync(file.fileno())
    return {"transfer_s": ended - began, "fsync_s": time.perf_counter() - ended}


def ranges(store: S3Store, key: str, descriptor: int) -> None:
    """Threads that ask for 16 MiB each; obstore lets go of the interpreter's lock meanwhile."""
    size = obstore.head(store, key)["size"]

    def one(offset: int) -> None:
        data = memoryview(
            obstore.get_range(store, key, start=offset, length=min(RANGE_BYTES, size - offset))
        )
        while data:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, range(0, size, RANGE_BYTES)))


def stream(store: S3Store, key: str, descriptor: int) -> None:
    """One GET, written as it comes."""
    for piece in obstore.get(store, key).stream(min_chunk_size=RANGE_BYTES):
        data = memoryview(piece)
        while data:
            data = data[os.write(descriptor, data) :]


def main() -> None:
    """Take orders until there are no more."""
    for line in sys.stdin:
        order = json.loads(line)
        try:
            told: dict[str, Any] = {} if "ready" in order else download(order)
        except OSError as e:
            told = {"error": str(e)}
        print("answer " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()

"""`aws s3 cp` as the command's own entry point, in a process that has imported it already. Run by
awscli's own interpreter.

Orders: {"bucket", "key", "file"}; answers the seconds of the transfer, and of the fsync after it.
"""

import json
import os
import sys
import time
from typing import Any

from awscli.clidriver import create_clidriver  # type: ignore[import-not-found]  # of this peer's environment only


def download(order: dict[str, Any]) -> dict[str, float]:
    """One `aws s3 cp`, then fsync."""
    began = time.perf_counter()
    status = create_clidriver().main(
        ["s3", "cp", "--quiet", f"s3://{order['bucket']}/{order['key']}", order["file"]]
    )
    ended = time.perf_counter()
    if status != 0:
        raise OSError(f"aws s3 cp ended with status {status}")
    with open(order["file"], "rb") as file:
        os.fsync(file.fileno())
    return {"transfer_s": ended - began, "fsync_s": time.perf_counter() - ended}


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

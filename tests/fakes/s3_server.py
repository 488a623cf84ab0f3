"""moto's S3 server in a process of its own: what a bucket answers, over HTTP."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """A running server on a free port; its address. Needs moto[server]."""
    argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        said = []
        for line in server.stderr:
            said.append(line)
            if found := re.search(r"Running on (http://\S+)", line):
                break
        else:
            raise RuntimeError(f"moto's server did not start: {''.join(said)}")
        # it logs each request, and stops when nobody reads
        drain = threading.Thread(target=server.stderr.read)
        drain.start()
        try:
            yield found[1]
        finally:
            server.terminate()
            drain.join()


def environment(address: str) -> dict[str, str]:
    """What makes the standard chain of credentials find the server at `address`, and nothing
    else."""
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_ENDPOINT_URL": address,
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


OTHER_VARIABLES = (
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL_S3",
)
"""To be unset beside `environment`."""


def fresh_bucket(address: str) -> str:
    """The name of a new bucket there."""
    import boto3

    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    client = boto3.client(
        "s3",
        endpoint_url=address,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=bucket)
    client.close()
    return bucket

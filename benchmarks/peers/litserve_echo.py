"""LitServe's echo: one worker, one API server. Run by LitServe's own interpreter."""

import argparse
from typing import Any

import litserve


class Echo(litserve.LitAPI):
    """Says what it was told."""

    def setup(self, device: str) -> None:
        """Nothing to load."""

    def decode_request(self, request: dict[str, Any]) -> str:
        """The text."""
        return str(request["text"])

    def predict(self, x: str) -> str:
        """The same text."""
        return x

    def encode_response(self, output: str) -> dict[str, str]:
        """As JSON."""
        return {"text": output}


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--home", required=True)
    given = parser.parse_args()
    server = litserve.LitServer(Echo(), accelerator="cpu", workers_per_device=1)
    server.run(
        host="127.0.0.1",
        port=given.port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="error",
    )


if __name__ == "__main__":
    main()

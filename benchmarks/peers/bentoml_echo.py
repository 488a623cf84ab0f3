"""BentoML's echo: one worker. Run by BentoML's own interpreter."""

import argparse
import os
import sys

import bentoml


@bentoml.service(workers=1, traffic={"timeout": 60})
class Echo:
    """Says what it was told."""

    @bentoml.api
    async def echo(self, text: str) -> str:
        """The same text."""
        return text


def main() -> None:
    """Become `bentoml serve`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--home", required=True)
    given = parser.parse_args()
    folder = os.path.dirname(os.path.abspath(__file__))
    environment = {**os.environ, "BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": given.home}
    command = [
        sys.executable,
        "-m",
        "bentoml",
        "serve",
        "bentoml_echo:Echo",
        "--host",
        "127.0.0.1",
        "--port",
        str(given.port),
    ]
    os.chdir(folder)
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()

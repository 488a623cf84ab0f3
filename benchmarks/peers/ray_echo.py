"""Ray Serve's echo: one replica, as many requests at once as the load keeps open. Run by Ray's own
interpreter."""

import argparse
import signal

import ray
from ray import serve
from starlette.requests import Request


@serve.deployment(num_replicas=1, max_ongoing_requests=64, ray_actor_options={"num_cpus": 0.5})
class Echo:
    """Says what it was told."""

    async def __call__(self, request: Request) -> str:
        """One request."""
        body = await request.json()
        return str(body["text"])


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--home", required=True)
    given = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200 * 1024**2,
        _temp_dir=f"{given.home}/r",
        log_to_driver=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    serve.run(Echo.bind())  # type: ignore[attr-defined]  # the decorator made it a Deployment
    signal.sigwait([signal.SIGTERM])
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

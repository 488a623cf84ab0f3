"""A model that is imported in the image only, on a GPU if there is one."""

import pilotlight as modal

image = modal.Image.debian_slim(python_version="3.11").pip_install("torch==2.13.0")
app = modal.App("style-inference")

with image.imports():
    import torch


@app.cls(image=image, memory=2048, max_containers=1, timeout=120)
class Model:
    width: int = modal.parameter(default=4)

    @modal.enter(snap=True)
    def load(self) -> None:
        torch.manual_seed(0)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.layer = torch.nn.Linear(self.width, 2).to(self.device)

    @modal.method()
    def shape(self, rows: list[list[float]]) -> list[int]:
        with torch.no_grad():
            return list(self.layer(torch.tensor(rows, device=self.device)).shape)


@app.local_entrypoint()
def main() -> None:
    print("shape:", Model().shape.remote([[1.0, 2.0, 3.0, 4.0]]))
    print("wider:", Model(width=5).shape.remote([[1.0] * 5] * 3))

"""A function that reads its secret before the snapshot."""

import os

import pilotlight

app = pilotlight.App("hasty")


@app.cls(cpu=0.25, memory="256MiB", secrets=[pilotlight.Secret.from_name("vault")])
class Hasty:
    """Too early."""

    @pilotlight.enter()
    def load(self) -> None:
        self.token = os.environ.get("VAULT_TOKEN", "none")

    @pilotlight.method()
    def ask(self) -> str:
        return "fine"

"""A sandbox: code that somebody else wrote, in a slot of its own."""

import pilotlight as modal

app = modal.App.lookup("style-sandbox", create_if_missing=True)


def main() -> None:
    sandbox = modal.Sandbox.create(app=app, timeout=60, block_network=True)
    process = sandbox.exec("python", "-c", "print(6 * 7)")
    print("said:", process.stdout.read().strip())
    sandbox.terminate()


if __name__ == "__main__":
    main()

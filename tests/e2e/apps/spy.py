"""What code of one tenant tries in order to reach another one's weights. Each answer is what the
kernel said."""

import os
import socket

import pilotlight

app = pilotlight.App("spy")


@app.function(memory="256MiB", scaledown_window=1)
def read(paths: list[str]) -> dict[str, str]:
    """Path → the first bytes of what is there, or the error's name."""
    said = {}
    for path in paths:
        try:
            if os.path.isdir(path):
                said[path] = "list " + ",".join(sorted(os.listdir(path))[:5])
            else:
                with open(path, "rb") as file:
                    said[path] = "read " + file.read(64).decode(errors="replace")
        except OSError as e:
            said[path] = type(e).__name__
    return said


@app.function(memory="256MiB", scaledown_window=1)
def connect(paths: list[str]) -> dict[str, str]:
    """Socket → `connected`, or the error's name."""
    said = {}
    for path in paths:
        with socket.socket(socket.AF_UNIX) as caller:
            try:
                caller.connect(path)
                said[path] = "connected"
            except OSError as e:
                said[path] = type(e).__name__
    return said


@app.function(memory="256MiB", scaledown_window=1)
def look(word: str) -> list[str]:
    """Every path with `word` in its last part, here and behind each process that this one sees; and
    memory of others that it may read."""
    roots = ["/", *(f"/proc/{pid}/root/" for pid in os.listdir("/proc") if pid.isdigit())]
    found: list[str] = []
    for top in [
        root + name
        for root in roots
        for name in ("run", "tmp", "home", "root", "var", "mnt", "opt", "srv")
    ]:
        for folder, folders, files in os.walk(top):
            found += [os.path.join(folder, name) for name in (*folders, *files) if word in name]
    for pid in [
        p
        for p in os.listdir("/proc")
        if p.isdigit() and os.stat(f"/proc/{p}").st_uid != os.getuid()
    ]:
        try:
            with open(f"/proc/{pid}/mem", "rb"):
                found.append(f"/proc/{pid}/mem")
        except OSError:
            continue
    return found

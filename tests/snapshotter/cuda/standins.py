"""Stand-ins for NVIDIA's two ways in, as programs: `cuda-checkpoint`, and the package `cuda` of
cuda-python.

Both keep the state of a "process" in a file named after its pid in $STANDIN_CUDA, and obey
`<pid>.hang` (empty: every call hangs; else only the action named in it) and `<pid>.die` beside it.
`calls` there gets a line for each action."""

from __future__ import annotations

from pathlib import Path

PROGRAM = """#!/bin/sh
cd "$STANDIN_CUDA" || exit 9
pid= timeout= map=
while [ $# -gt 0 ]; do
  case $1 in
    --help) echo "CUDA checkpoint and restore utility."; echo "Version 570.86.10. Copyright."; echo "--action lock | ..."; exit 0;;
    --get-state|--get-restore-tid) what=$1;;
    --action) what=$2; shift;;
    --pid) pid=$2; shift;;
    --timeout) timeout=$2; shift;;
    --device-map) map=$2; shift;;
  esac
  shift
done
[ -e "$pid.hang" ] && hang=$(cat "$pid.hang") && { [ -z "$hang" ] || [ "$hang" = "$what" ]; } && exec sleep 600
[ -e "$pid.die" ] && kill -9 $$
[ -e "$pid" ] || { echo "Error: process $pid holds no CUDA"; exit 1; }
state=$(cat "$pid")
move() {
  [ "$state" = "$1" ] || { echo "Error: $what from $state: invalid value"; exit 1; }
  echo "$2" > "$pid"
  echo "$what $timeout$map" >> calls
}
case $what in
  --get-state) echo "$state";;
  --get-restore-tid) echo "$((pid + 1))";;
  lock) move running locked;;
  checkpoint) move locked checkpointed;;
  restore) move checkpointed locked;;
  unlock) move locked running;;
esac
"""

DRIVER = """
import os
def cuInit(flags):
    return (int(os.environ.get("STANDIN_CUINIT", "0")),)
"""

CHECKPOINT = """
import os, pathlib, signal, time
print("a library that prints")
class CUDAError(Exception): pass
class Process:
    def __init__(self, pid):
        self._folder = pathlib.Path(os.environ["STANDIN_CUDA"])
        self._pid = pid
        self._maybe_hang("")
        if (self._folder / f"{pid}.die").exists():
            os.write(2, b"Segmentation fault\\n")
            os.kill(os.getpid(), signal.SIGKILL)
    def _maybe_hang(self, what):
        marker = self._folder / f"{self._pid}.hang"
        if marker.exists() and marker.read_text() == what: time.sleep(600)
    @property
    def state(self):
        try: return (self._folder / str(self._pid)).read_text().strip()
        except FileNotFoundError: raise CUDAError("CUDA_ERROR_INVALID_VALUE") from None
    @property
    def restore_thread_id(self): return self.state and self._pid + 1
    def _move(self, what, old, new, note=""):
        self._maybe_hang(what)
        if self.state != old: raise CUDAError(f"CUDA_ERROR_ILLEGAL_STATE: {what} from {self.state}")
        (self._folder / str(self._pid)).write_text(new)
        with (self._folder / "calls").open("a") as calls: calls.write(f"{what} {note}\\n")
    def lock(self, timeout_ms=0): self._move("lock", "running", "locked", timeout_ms)
    def checkpoint(self): self._move("checkpoint", "locked", "checkpointed")
    def restore(self, gpu_mapping=None):
        self._move("restore", "checkpointed", "locked", ",".join(f"{a}={b}" for a, b in (gpu_mapping or {}).items()))
    def unlock(self): self._move("unlock", "locked", "running")
"""


def write_program(folder: Path, text: str = PROGRAM) -> Path:
    """`cuda-checkpoint` in `folder`."""
    path = folder / "cuda-checkpoint"
    path.write_text(text)
    path.chmod(0o755)
    return path


def write_package(folder: Path) -> None:
    """The package `cuda`, for PYTHONPATH=`folder`."""
    for package in ("cuda", "cuda/core", "cuda/bindings"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
    (folder / "cuda/bindings/driver.py").write_text(DRIVER)
    (folder / "cuda/core/checkpoint.py").write_text(CHECKPOINT)

"""GPU state of a process: moved off the device before CRIU dumps the process, and back after CRIU
has restored it.

This package talks to NVIDIA's driver about *another* process (states, drivers, preconditions, the
sequence with its rollbacks). The agent itself never initialises the driver: a helper process does,
and is killed if it hangs. Callers use only `devices.Devices`."""

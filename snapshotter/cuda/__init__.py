"""GPU state of a process, taken off the device before CRIU dumps it and put back after CRIU has
restored it.

Here lives what talks to NVIDIA's driver about *another* process (states, drivers, preconditions,
the sequence with its ways back). The driver is never initialised in the agent itself: a helper
process does that, and is killed when it hangs. The integrator sees `devices.Devices` and nothing
else."""

"""Fair sharing of scarce capacity: the order of waiting calls and starts, load shedding, and
preemption of idle instances."""

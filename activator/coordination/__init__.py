"""What several activators of one platform must agree on: who is there, how many instances each may
hold, how often a stranger may knock.

Only with `activator.activators` above one. A lone activator has no shared state and asks nobody; a
warm call never comes here either. `peers` and `identity` are about activators beside this one."""

"""Jobs, attempts, leases, pausing, commands, checkpoints. Every write of an attempt is fenced."""

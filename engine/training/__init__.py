"""The training loop, its schedule, live commands, the report, and how a run starts and fails."""

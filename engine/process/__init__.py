"""The processes with torch: the rank, the fork server, the planner, and their limits."""

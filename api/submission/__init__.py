"""Checks before a job is stored: find its data and checkpoint, and call the planner."""

"""The client of the planner: processes that have torch and check specs."""

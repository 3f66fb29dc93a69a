"""What happens before a job is stored: its data and checkpoint are found, the planner is asked."""

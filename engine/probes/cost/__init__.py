"""Measure the cost of watching; the governor keeps it within the budgets of the probes."""

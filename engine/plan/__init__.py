"""Predict what a job needs and costs, and check its spec, before it runs; the catalog."""

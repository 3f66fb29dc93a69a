"""What a job will need and cost, and what is wrong with its spec, before it runs; the catalog."""

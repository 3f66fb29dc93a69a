"""The commands for what is not a job: datasets, devices, checkpoints, quotas, webhooks, workers."""

"""The processes of one job: their group, what they exchange, and how they share the training."""

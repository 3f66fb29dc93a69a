"""The cost of watching and of guards, and what slow disks and readers do to training."""

"""What makes a worker check for work: wake-ups, the periodic sweep, and the canary."""

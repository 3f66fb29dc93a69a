"""What makes a worker look for work: messages, the periodic sweep, and the canary."""

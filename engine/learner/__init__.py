"""What is trained: the network with its losses, optimizer, schedule, averages and tuning."""

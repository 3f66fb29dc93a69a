"""Workers, devices and the queue; their heartbeats; notifications through the broker."""

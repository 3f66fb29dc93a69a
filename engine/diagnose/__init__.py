"""Measure and check what the processes of a job need of the hardware: messages and memory."""

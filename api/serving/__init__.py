"""Prediction requests: which replica answers them, and the connections to replicas."""

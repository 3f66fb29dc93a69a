"""Faults at random, and a verifier that reads the public API only."""

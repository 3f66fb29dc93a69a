"""Watching a network while it trains: what is seen, when, and how it leaves the process."""

"""Receive uploads and refuse unsafe ones."""

"""Webhooks, and the only module that connects to addresses that users set."""

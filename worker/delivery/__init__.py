"""Webhooks, and the only module that connects to an address that a user has named."""

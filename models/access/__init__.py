"""Quotas, idempotency keys, webhooks, and the addresses that webhooks may have.

API keys are in ``models.keys``, which is also a command.
"""

"""Routes of what belongs to an owner: keys, sessions, quotas, webhooks."""

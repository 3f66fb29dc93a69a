"""Server-sent events and long polling: tails of event logs, cursors, wake-ups."""

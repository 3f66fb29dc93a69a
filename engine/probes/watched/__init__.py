"""What can be watched and what is: names, globs, probes at work, the places of hooks."""

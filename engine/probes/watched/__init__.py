"""What can be watched and what is: names, globs, active probes, hook sites."""

"""The fork server, the ranks that it forks, and the registry of ranks on disk."""

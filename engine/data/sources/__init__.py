"""Sources of rows: in memory, in files, in several datasets, in the request itself."""

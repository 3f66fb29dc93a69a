"""Where the rows are: in memory, in files, in several datasets, in the request itself."""

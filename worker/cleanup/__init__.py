"""What is deleted in the background: expired rows and files, and files that no row names."""

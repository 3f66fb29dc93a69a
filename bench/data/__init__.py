"""The cost of making batches, and the memory that training takes."""

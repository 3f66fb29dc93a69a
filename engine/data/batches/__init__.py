"""The order of the rows and how they become batches: shuffling, buckets, prefetching."""

"""Random changes of images. Each is a function of the seed, the epoch and the row."""

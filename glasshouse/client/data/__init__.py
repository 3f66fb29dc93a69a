"""What the client uploads and reads: files, frames, tensors, series, statistics, weights.

Nothing here makes a request.
"""

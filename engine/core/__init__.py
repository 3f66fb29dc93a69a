"""What every folder of the engine uses: problems of a spec, names of tensors, records, timing.

Nothing here imports another folder of the engine.
"""

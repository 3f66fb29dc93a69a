"""The columns of a dataset as tensors: by kind of field, with normalization and vocabularies."""

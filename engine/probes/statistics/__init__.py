"""The figures of a tensor and its histogram: native, by Triton, or by plain torch."""

"""Statistics and histogram of a tensor: native, Triton or plain torch."""

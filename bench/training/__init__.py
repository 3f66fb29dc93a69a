"""The speed of a training step, compared with plain torch code and with other tools."""

"""The devices of a host: inventory, hardware, CUDA devices, usage."""

"""How the client reaches a service: its address and key, requests and retries, event decoding.

Also the service that runs in the caller's own process. What requests mean is not here.
"""

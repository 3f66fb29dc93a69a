"""What all routes share of HTTP: middleware, access, bodies, errors, negotiation, ranges."""

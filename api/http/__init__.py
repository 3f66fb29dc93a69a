"""HTTP code that all routes share: middleware, access, bodies, errors, negotiation, ranges."""

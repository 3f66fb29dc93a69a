"""One attempt of one job: launch, liveness, control, storing what the rank writes, and its end."""

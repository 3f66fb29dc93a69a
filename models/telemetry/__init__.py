"""OpenTelemetry traces of requests and attempts."""

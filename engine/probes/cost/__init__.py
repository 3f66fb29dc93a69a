"""What looking costs, and the governor that holds it to what its probes allow."""

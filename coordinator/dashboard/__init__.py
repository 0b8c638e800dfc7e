"""What a run does, for browsers and for Prometheus: read only, and only when it is asked for."""

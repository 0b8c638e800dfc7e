"""One rank's inner steps."""

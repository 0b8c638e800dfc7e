"""What others may ask: a desk answers each service, a thin servicer puts it on gRPC."""

"""What a node trains on: bytes of text or token shards, their samples and order, and 'atoll data'."""

"""What is on the wire: messages as frozen values, their conversion, payloads, channels, servers."""

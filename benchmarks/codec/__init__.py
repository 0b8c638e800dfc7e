"""What codecs cost and lose."""

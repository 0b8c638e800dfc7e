"""Loss over bytes, for codecs, intervals and outer rules."""

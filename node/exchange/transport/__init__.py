"""How payloads travel between members, and only between members."""

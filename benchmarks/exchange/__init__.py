"""How long an exchange takes over slow links."""

"""A node and its coordinator: joining, the session, what is called and what is told."""

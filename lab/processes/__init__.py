"""Coordinator and nodes as processes of their own, and what is done to them."""

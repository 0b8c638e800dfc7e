"""What nodes and the coordinator must agree on. Imports neither of them, nor torch, nor hivemind."""

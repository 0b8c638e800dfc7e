"""The fast links: a node's local ranks, its model, its data, its inner loop."""

"""One round as this node knows it, as a pure core: its state with admission, and its transition."""

"""One round as this node knows it, as a pure core: state, admission of payloads, transition."""

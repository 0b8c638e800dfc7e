"""The coordinator's core: (state, event, now) -> (state, actions, reason). No I/O, clock or randomness."""

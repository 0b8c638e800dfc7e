"""The coordinator's core: (state, event, now) -> (state, actions, reason). No I/O, no own clock."""

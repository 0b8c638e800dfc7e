"""Which exchange a run takes, by its model, its links and the speed of its nodes: for atoll init."""

"""A node's records on its owner's disk: one store, one budget. Knows neither the exchange nor the island."""

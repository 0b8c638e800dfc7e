"""What training must know of a model, one room for each kind of model."""

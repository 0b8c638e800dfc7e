"""How a model is spread over the ranks of an island: meshes, and what torch makes of them."""

"""What a run is: its file, what of it may be amended, models, parameters and their layout, memory."""

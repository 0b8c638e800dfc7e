"""What settings do to the loss."""

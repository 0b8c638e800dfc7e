"""What nodes cost the coordinator."""

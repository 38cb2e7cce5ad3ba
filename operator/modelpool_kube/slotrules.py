"""What may be done with a slot, decided from what was read. Pure."""

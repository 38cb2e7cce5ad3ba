"""What is to be done, decided from what was read. Pure."""

"""Reads, asks the plan, and carries it out."""
